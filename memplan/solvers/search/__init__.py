"""memplan.solvers.search: to be described."""
