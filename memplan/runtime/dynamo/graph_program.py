"""`first_program_of`: traces, plans and tries a graph of dynamo."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.graph_module import GraphModuleWithParams
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.measured_budget import Built, first_program
from memplan.runtime.memory.arena import Arena, NewArenas
from memplan.runtime.memory.arena_parts import ObservedOwnership, part_of
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import RunOptions
from memplan.trace import capture_call
from memplan.trace.default_kernels import made_by_default, with_kernels
from memplan.trace.traced import TracedGraph


def first_program_of(
    module: GraphModuleWithParams,
    inputs: Sequence[Any],
    options: RunOptions,
    coordinator: ArenaCoordinator,
    hooks: Hooks,
) -> tuple[TracedGraph, Runner]:
    """Return the trace of a graph, and its first program, which is planned and tried.

    `options`: with `gradients` as they are for this graph.
    """
    guards = ModuleGuards(module)
    rest = module.set_kept(inputs)

    def make(options: RunOptions) -> Built:
        """Return the program, traced, planned and tried."""
        traced = _trace(module, rest, options)
        with torch.inference_mode(False), NewArenas() as made:

            def assemble(settled: TracedGraph, plan: Plan) -> Runner:
                """Return the program of a plan in an arena of its own."""
                arena = part_of(made.keep(Arena(plan.arena_size, traced.device)), ObservedOwnership(coordinator))
                added = options.gradients_copied
                return Runner(guards, settled, plan, arena, sanitize=options.sanitize, added=added, hooks=hooks)

            return first_program(options, traced, None, assemble)

    options, built = made_by_default(with_kernels(options, module, rest), type(module).__name__, make)
    if options.has_budget:  # a joint plan of all graphs may be tried on the example
        return built.traced, built.runner
    built.runner.forget_example()  # the first batch: nobody else may hold it
    return built.traced.without_data(), built.runner


def _trace(module: GraphModuleWithParams, rest: Sequence[Any], options: RunOptions) -> TracedGraph:
    """Return the trace of a graph, with its backward if autograd would record the call."""
    placed = next((x for x in (*module.tensors(), *rest) if is_traceable_wrapper_subclass(x)), None)
    if placed is not None:
        what = f"an input of type {type(placed).__name__}, behind which there are other tensors"
        hint = "use memplan.compile or compile_step, which plan what parallelize_module and fully_shard divide"
        raise UnsupportedGraph(type(module).__name__, what, hint, see="inputs")
    train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*module.parameters(), *rest))
    with torch.inference_mode(False):  # this enables gradients, too
        captured = capture_call(
            module,
            tuple(rest),
            by_dynamo=True,
            train=train,
            in_place=options.in_place,
            gradients_in_arena=options.gradients_in_arena,
            copy_gradients=options.gradients_copied,
            kernels=options.kernels,
        )
        captured.warn()
        return captured.first()


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad
