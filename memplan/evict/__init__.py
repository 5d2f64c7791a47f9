"""Planned eviction: turns a scheduled step that exceeds a budget into one that keeps it and computes the same results.

In: a `Workload` (`workload.py`: graph, order, costs, budget). Out: a sequence of events (`events.py`), from which
`graph/` builds a `Graph` with the recomputes and copies as ordinary ops. Start at `policies/auto.py`, the default;
`select.py` lists all policies.
"""

from __future__ import annotations
