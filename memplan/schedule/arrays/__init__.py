"""memplan.schedule.arrays: to be described."""
