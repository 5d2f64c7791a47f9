"""Searches for an order with a smaller max live: `ideals.py` over ideals, `cpsat.py` by constraint programming.

`beam.py` keeps the best states of each level; `exact.py` drops only states that cannot be better.
"""
