"""tests.check: to be described."""
