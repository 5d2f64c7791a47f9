"""The search for an arena of a given capacity, and the bounds that it proves.

Start at `capacity_search.py` (which capacity next), then `solve_at_capacity.py` (one capacity), `reduce.py` (what need not
be searched), `tree_search.py` (place or skip), `eject.py` and `squeaky_wheel.py` (local search), `cpsat_model.py`.
"""
