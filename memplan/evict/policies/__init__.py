"""memplan.evict.policies: to be described."""
