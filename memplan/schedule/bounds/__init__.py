"""memplan.schedule.bounds: to be described."""
