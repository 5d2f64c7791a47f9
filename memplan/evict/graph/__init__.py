"""Builds the graph of a sequence of events, and proves that it computes the same as the traced graph.

`apply.py` makes every recompute and copy an op; `equivalent.py`, which knows no policy, compares the two graphs.
"""
