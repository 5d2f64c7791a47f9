"""Represents a problem as arrays, and places buffers one after another on them.

Start at `problem_arrays.py` (normalized sizes and times), then `heuristics.py` (first placements) and `instance.py` (a
piece prepared for the search).
"""
