"""memplan.evict.search: to be described."""
