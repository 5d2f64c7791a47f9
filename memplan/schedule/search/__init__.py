"""Searches for an order with a smaller max live.

In: `GraphArrays` and a bound. Out: an order, or the proof that there is none below the bound. Start at `ideals.py`,
which searches over ideals (sets of ops that can run first); `cpsat.py` uses constraint programming; `beam.py` keeps
the best states of each level; `exact.py` drops only states that cannot be better.
"""
