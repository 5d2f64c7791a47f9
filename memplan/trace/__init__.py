"""Trace an `nn.Module` on example inputs into a `TracedGraph`. Only this package captures and rewrites graphs.

In: an `nn.Module` and example inputs. Out: a `TracedGraph`. Start at `tracing.py`: `capture_call` is the one entry. It
runs `capture/` (one joint graph on fake tensors); then the passes over that graph follow (`passes/`, `chunking/`,
`optimizer/`), then `graph/` (from the fx graph to the types in `traced.py`). With `kernels="inductor"`, `fused/` has
Inductor generate the kernels instead of the passes. `planning.py` plans the result, and asks the `CapturedCall` for
other variants of a step. What torch keeps to itself is named in `memplan/torch_inside/`.
"""

from __future__ import annotations

from memplan.distributed.fake_ranks import fake_ranks
from memplan.trace.capture.joint_graph import Captured
from memplan.trace.planning import (
    device_costs,
    plan,
    plan_step,
    plan_traced,
)
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, capture_call, trace, trace_captured
from memplan.trace.whole_step import CapturedLoss, capture_loss

__all__ = [
    "Captured",
    "CapturedCall",
    "CapturedLoss",
    "TracedGraph",
    "capture_call",
    "capture_loss",
    "device_costs",
    "fake_ranks",
    "plan",
    "plan_step",
    "plan_traced",
    "trace",
    "trace_captured",
]
