"""memplan.trace.lowering: to be described."""
