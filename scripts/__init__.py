"""scripts: to be described."""
