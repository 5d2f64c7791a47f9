"""Tracing: `nn.Module` + example inputs -> `TracedGraph`, and `plan`, which needs nothing but the trace.

In the order in which data flows: `front_ends.py` (front ends), `own_outputs.py`, `fold.py`, `simplify.py`, `divide.py`,
`pack.py`, `quantize.py`, `rules.py`, `layer_rules.py` and `products.py` (passes over the fx graph, through
`rewrite.py`), `build.py` (fx graph -> `traced.py`); `tracing.py` runs them, `planning.py` plans what they made. Nothing
is computed here but small constants.
"""

from __future__ import annotations

from memplan.trace.capture.front_ends import Captured, capture
from memplan.trace.planning import (
    ARENA,
    GRADIENTS,
    LAYOUTS,
    alignment_of,
    device_costs,
    layout_solver,
    plan,
    plan_traced,
    stay_in_arena,
)
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import trace, trace_captured, trace_graph, trace_step

__all__ = [
    "ARENA",
    "GRADIENTS",
    "LAYOUTS",
    "Captured",
    "TracedGraph",
    "alignment_of",
    "capture",
    "device_costs",
    "layout_solver",
    "plan",
    "plan_traced",
    "stay_in_arena",
    "trace",
    "trace_captured",
    "trace_graph",
    "trace_step",
]
