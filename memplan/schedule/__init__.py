"""Execution orders: `Graph -> Schedule`, one file per policy, and the lower bound over all orders.

Read `legal_orders.py` (which orders compute the same), `base.py`, `core.py` (a graph as arrays), `cut.py` (the least that
any order needs), then `portfolio.py`, the default, and what it tries: a policy per file, `repair.py`, `search.py`.
Loops that must be fast are in `*_kernel.py`, compiled on large graphs only.
"""

from __future__ import annotations

from memplan.core.legal_orders import predecessors, require_legal
from memplan.core.schedule import Evidence, Schedule, live_bytes, make_schedule
from memplan.schedule.barrier import Barrier, accumulated, price
from memplan.schedule.bounds.cut import cut_bound, working_set_bound
from memplan.schedule.evidence import is_proven_again, require_evidence
from memplan.schedule.policies.traced import traced
from memplan.schedule.select import POLICIES, Policy, order

__all__ = [
    "Barrier",
    "Evidence",
    "POLICIES",
    "Policy",
    "Schedule",
    "accumulated",
    "cut_bound",
    "is_proven_again",
    "live_bytes",
    "make_schedule",
    "order",
    "predecessors",
    "price",
    "require_evidence",
    "require_legal",
    "traced",
    "working_set_bound",
]
