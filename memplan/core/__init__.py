"""memplan.core: to be described."""
