"""tests.planning: to be described."""
