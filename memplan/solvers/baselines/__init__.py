"""memplan.solvers.baselines: to be described."""
