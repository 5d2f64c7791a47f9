"""memplan.runtime.kernels: to be described."""
