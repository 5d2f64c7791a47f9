"""memplan.runtime.recording: to be described."""
