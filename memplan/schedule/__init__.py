"""Orders the ops: `Graph` in, `Schedule` out, with a proven lower bound of max live over all legal orders.

Start at `auto.py`, the default: it repairs the traced order, and orders listed by simple rules, at their peaks by
minimum cuts (`cut.py`). `policies.py` lists the policies by name, `graph_arrays.py` holds a graph as flat arrays.
"""

from __future__ import annotations

from memplan.schedule.cut import cut_bound
from memplan.schedule.policies import POLICIES, Policy, order, proven, require_evidence, traced

__all__ = ["POLICIES", "Policy", "cut_bound", "order", "proven", "require_evidence", "traced"]
