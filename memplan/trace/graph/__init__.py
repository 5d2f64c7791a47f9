"""memplan.trace.graph: to be described."""
