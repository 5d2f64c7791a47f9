"""memplan.runtime.memory: to be described."""
