"""memplan.runtime.codegen: to be described."""
