"""memplan.solvers.arrays: to be described."""
