"""memplan.check: to be described."""
