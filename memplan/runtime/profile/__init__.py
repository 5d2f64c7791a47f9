"""Measured steps, and plans made from what was measured (`costs="measure"`; Capuchin's measured and guided execution)."""
