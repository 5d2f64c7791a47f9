"""Solvers of one rule each. The portfolio starts from `greedy.py`; users may select any; benchmarks compare them."""
