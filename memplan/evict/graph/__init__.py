"""memplan.evict.graph: to be described."""
