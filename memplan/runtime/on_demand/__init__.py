"""memplan.runtime.on_demand: to be described."""
