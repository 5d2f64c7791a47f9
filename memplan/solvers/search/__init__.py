"""Searches for a placement within a given capacity, and proves lower bounds.

Start at `capacity_search.py` (the next capacity), then `solve_at_capacity.py` (one capacity), `reduce.py` (buffers that
need no search), `tree_search.py` (place or skip), `eject.py` and `squeaky_wheel.py` (local search), `cpsat_model.py`.
"""
