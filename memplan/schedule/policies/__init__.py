"""memplan.schedule.policies: to be described."""
