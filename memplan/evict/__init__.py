"""Planned eviction: turns a scheduled step that exceeds a budget into one that keeps it and computes the same results.

In: a `Workload` (`workload.py`: graph, order, costs, budget). Out: a sequence of events, from which `apply.py` builds a
`Graph` with the recomputes and copies as ordinary ops; `equivalent.py`, which knows no policy, compares the two graphs.
Start at `policies/auto.py`, the default; `policies/__init__.py` lists all. `measure.py` predicts the bytes and the
seconds of events, `costs.py` the seconds of ops, copies and graphs.
"""

from __future__ import annotations
