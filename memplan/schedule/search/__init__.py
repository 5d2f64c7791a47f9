"""Searches for an order that needs less: `ideals.py` level by level over ideals, `cpsat.py` by constraint programming.

`beam.py` keeps the best states of each level, `exact.py` drops only what cannot be better.
"""
