"""memplan.trace.dynamic: to be described."""
