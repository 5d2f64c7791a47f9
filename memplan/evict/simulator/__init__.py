"""memplan.evict.simulator: to be described."""
