"""tests.core: to be described."""
