"""memplan.schedule.search: to be described."""
