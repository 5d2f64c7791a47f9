"""memplan.evict.judge: to be described."""
