"""Makes a graph of dynamo a module again, and traces, plans and tries it (`first_program_of`).

The graphs of dynamo take all tensors as inputs, parameters included. The module has the parameters, so that they are
addresses in the generated code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.measured_budget import Built, first_program
from memplan.runtime.memory.arena import Arena, NewArenas
from memplan.runtime.memory.arena_parts import ObservedOwnership, part_of
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import RunOptions
from memplan.trace import capture_call
from memplan.trace.capture.origins import user_of
from memplan.trace.default_kernels import made_by_default, with_kernels
from memplan.trace.traced import TracedGraph


class GraphModuleWithParams(nn.Module):
    """A graph of dynamo as a module: it keeps some inputs (by position, with names) and is called with the others."""

    def __init__(self, graph: fx.GraphModule, kept: Mapping[int, str], inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        self._kept = kept
        for i, name in self._kept.items():
            if isinstance(inputs[i], nn.Parameter):
                self.register_parameter(name, inputs[i])
            else:
                self.register_buffer(name, inputs[i])

    def forward(self, *rest: Any) -> Any:
        """Run the graph with the kept inputs and `rest`; what it is traced into knows the model's lines."""
        given = iter(rest)
        kept = {i: getattr(self, name) for i, name in self._kept.items()}
        inputs = (kept[i] if i in kept else next(given) for i in range(len(rest) + len(kept)))
        with fx.traceback.preserve_node_meta():
            return fx.Interpreter(self.graph).run(*inputs)

    def set_kept(self, inputs: Sequence[Any]) -> list[Any]:
        """Set the parameters and buffers to those among the inputs of a call; return the other inputs."""
        for i, name in self._kept.items():
            (self._parameters if name in self._parameters else self._buffers)[name] = inputs[i]
        return [x for i, x in enumerate(inputs) if i not in self._kept]

    def tensors(self) -> list[Any]:
        """Return the parameters and buffers that it has now."""
        return [*self._parameters.values(), *self._buffers.values()]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Return whether the parameters are those among `inputs`; buffers may be replaced at each call."""
        return all(self._parameters[name] is inputs[i] for i, name in self._kept.items() if name in self._parameters)


def named_class(graph: fx.GraphModule) -> type[GraphModuleWithParams]:
    """Return a subclass of `GraphModuleWithParams` with the name of the user's module, for plans and errors."""
    name = user_of(graph.graph)
    return (
        type(name, (GraphModuleWithParams,), {"__doc__": GraphModuleWithParams.__doc__})
        if name
        else GraphModuleWithParams
    )


def is_kept(x: Any) -> bool:
    """Return whether an input is a leaf parameter or a buffer, whose address rarely changes.

    A tensor that replaces a parameter, as in `torch.func.functional_call`, is an input with a gradient.
    """
    if isinstance(x, nn.Parameter):
        return x.is_leaf
    return getattr(x, "_dynamo_static_input_type", None) is not None and not x.requires_grad


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
