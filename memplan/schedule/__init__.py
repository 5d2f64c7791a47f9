"""Execution orders: `Graph -> Schedule`, one file per policy, and the lower bound over all orders."""

from __future__ import annotations

from memplan.schedule.base import Schedule, live_bytes, make_schedule
from memplan.schedule.bound import working_set_bound
from memplan.schedule.legal import predecessors, require_legal
from memplan.schedule.traced import traced

__all__ = ["Schedule", "live_bytes", "make_schedule", "predecessors", "require_legal", "traced", "working_set_bound"]
