"""memplan.runtime.api: to be described."""
