"""memplan.analysis: to be described."""
