"""Orders the ops: `Graph` in, `Schedule` out, with a proven lower bound of max live over all legal orders.

Start at `portfolio.py`, the default: it repairs the traced order at its peak by minimum cuts (`prover.py`), and
searches if the cuts leave a gap (`ideals.py`). `select.py` lists the policies by name, `graph_arrays.py` holds a graph
as flat arrays; loops in `*_kernel.py` are compiled by numba on large graphs only.
"""

from __future__ import annotations

from memplan.core.legal_orders import predecessors, require_legal
from memplan.core.schedule import Evidence, Schedule, live_bytes, make_schedule, working_set_bound
from memplan.schedule.cut import cut_bound
from memplan.schedule.select import POLICIES, Policy, order, require_evidence, traced

__all__ = [
    "Evidence",
    "POLICIES",
    "Policy",
    "Schedule",
    "cut_bound",
    "live_bytes",
    "make_schedule",
    "order",
    "predecessors",
    "require_evidence",
    "require_legal",
    "traced",
    "working_set_bound",
]
