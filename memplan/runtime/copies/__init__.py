"""memplan.runtime.copies: to be described."""
