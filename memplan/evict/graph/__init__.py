"""From events to a graph, and the proof that it computes the same.

`apply.py` makes every recompute and copy an op; `equivalent.py`, which knows no policy, compares the two graphs.
"""
