"""Trace an `nn.Module` on example inputs into a `TracedGraph`. Only this package knows dynamo, AOTAutograd and fx.

In: an `nn.Module` and example inputs. Out: a `TracedGraph`. Start at `tracing.py`. It runs `capture/` (one joint
graph on fake tensors), then the passes over that graph (`passes/`, `lowering/`, `chunking/`, `compression/`,
`optimizer/`), then `graph/` (from the fx graph to the types in `traced.py`). `planning.py` plans the result.
"""

from __future__ import annotations

from memplan.trace.capture.joint_graph import Captured
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
