"""memplan.runtime.execute: to be described."""
