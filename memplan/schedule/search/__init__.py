"""Searches for an order with a smaller max live: `ideals.py` over ideals, `cpsat.py` by constraint programming.

Start at `ideals.py`: its policy `beam` keeps the best states of each level, and `exact` drops only states that cannot
be better. `auto` runs the same search within limits of work.
"""
