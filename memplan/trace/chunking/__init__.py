"""memplan.trace.chunking: to be described."""
