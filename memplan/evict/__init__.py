"""Eviction by plan: a scheduled step that does not fit a budget becomes one that does, and computes the same.

In the order in which data flows: `costs.py` (seconds of ops and copies), `workload.py` (the question), policies, one
file each (`select.py` names them, `auto.py` is the default), which answer with `events.py`; `apply.py` (events ->
graph), `equivalent.py` (the oracle), `fit.py` (all of it). `arrays.py` and `*_kernel.py` are the same rules compiled,
for policies that search. Those that walk through the step and evict on demand (`dtr.py`, `delta.py`, `flow.py`) share
`eviction_simulator.py`, on a `device_state.py`; `overlap.py` moves copies under ops; `recompute_limits.py` says until when a storage can be made
again; `feedback.py` what measured steps change.
"""

from __future__ import annotations
