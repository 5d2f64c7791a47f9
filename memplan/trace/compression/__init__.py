"""memplan.trace.compression: to be described."""
