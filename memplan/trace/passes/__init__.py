"""memplan.trace.passes: to be described."""
