"""memplan.trace.optimizer: to be described."""
