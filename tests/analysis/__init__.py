"""tests.analysis: to be described."""
