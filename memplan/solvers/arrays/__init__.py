"""A problem as arrays, and placing buffers one after another on them.

Start at `problem_arrays.py` (normalised sizes and times), then `heuristics.py` (first answers) and `instance.py` (a piece
made ready to be searched).
"""
