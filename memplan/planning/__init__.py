"""memplan.planning: to be described."""
