"""`SeveralGraphs`: runs a model as the graphs into which dynamo breaks it, in one planned arena."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.api.pending_calls import require_room
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.backend import Backend
from memplan.runtime.options import CompileOptions, RunOptions
from memplan.torch_inside.dynamo import dynamo_config
from memplan.torch_inside.versions import compile_limits
from memplan.trace.capture.refusals import breaks, runs_as_eager

_MAX_RECOMPILES = 64  # of one function of the model, beyond which dynamo runs it eagerly
# options that `Backend` does not take
_OF_ONE_GRAPH = ("gradients", "device", "divide", "compress", "dynamic_shapes")


class SeveralGraphs:
    """Runs calls of a model as graphs of dynamo, which `backend` plans, with Python between them.

    Nothing runs when it is made: each graph is traced and planned when it is first called. `hooks` are called with the
    events of all graphs.
    """

    def __init__(self, model: nn.Module, options: RunOptions, hooks: Hooks) -> None:
        shared = {f.name: getattr(options, f.name) for f in fields(RunOptions) if f.name not in _OF_ONE_GRAPH}
        self.backend = Backend(**{**shared, "gradients": "outside"})
        self.backend.hooks = hooks

        def call(*args: Any, **kwargs: Any) -> Any:
            """Call the model with its hooks: the function that dynamo traces."""
            return model(*args, **kwargs)

        compile_call: Any = torch.compile  # whose overloads lack the limits
        limits = compile_limits(isolate_recompiles=True, recompile_limit=_MAX_RECOMPILES)
        self._run = compile_call(call, backend=self.backend, **limits)
        self._ran = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a call of the model."""
        self._ran = True
        # numpy's random numbers are drawn by numpy, as in eager, and not by torch
        with dynamo_config(use_numpy_random_stream=True):
            return self._run(*args, **kwargs)

    def make_room(self, options: CompileOptions, plan: Plan) -> None:
        """Free the arenas of the graphs until they run again, for a program of `plan` that runs as one graph.

        Raises `BudgetInfeasible` if a call of theirs waits for its backward and both break a budget.
        """
        if self._ran and self.backend.release():
            self._ran = False
        if self._ran:
            require_room(options, plan, self.backend.arena_size)


def can_be_several(refused: UnsupportedGraph, options: RunOptions) -> bool:
    """Return whether several graphs, or eager, can hold what one graph cannot, and all options hold then too."""
    if not (breaks(refused) or (runs_as_eager(refused) and not options.has_budget)):
        return False
    plain = {f.name: f.default for f in fields(CompileOptions) if f.name in (*_OF_ONE_GRAPH[1:], "cuda_graph")}
    held = all(getattr(options, name) == default for name, default in plain.items())
    return held and not options.measures
