"""Eviction by plan: a scheduled step that does not fit a budget becomes one that does, and computes the same.

In: a `Workload` (`workload.py`: graph, order, `costs.py`, budget). Out: `events.py`, and by `graph/` a `Graph` with the
recomputes and copies as ordinary ops. Start at `policies/auto.py`, the default; `select.py` names all policies.
"""

from __future__ import annotations
