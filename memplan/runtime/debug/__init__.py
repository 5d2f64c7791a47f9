"""memplan.runtime.debug: to be described."""
