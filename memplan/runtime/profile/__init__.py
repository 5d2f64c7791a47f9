"""memplan.runtime.profile: to be described."""
