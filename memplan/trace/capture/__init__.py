"""memplan.trace.capture: to be described."""
