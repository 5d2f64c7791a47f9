"""Builds the graph of a sequence of events, and proves that it computes the same as the traced graph.

In: a `Workload` and events. Out: a `Graph` in which every recompute and copy is an op. Start at `apply.py`, which
builds it; `equivalent.py`, which knows no policy, compares the two graphs.
"""
