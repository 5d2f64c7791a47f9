"""memplan.runtime.guards: to be described."""
