"""`torch.compile(model, backend="memplan")`: every graph that dynamo finds is planned, forward and backward jointly.

Dynamo hands over graphs that take all tensors as inputs, parameters included. `GraphModuleWithParams` makes a module of such a
graph again, so that parameters are addresses in the generated code. A graph break leaves the activations of one
graph alive while the next runs, and one graph may run several times before its backward (layers that share their
code): each call that is in flight has a lane, which is a program. Lanes that run in one step share one arena
(`runtime/shared.py`).
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.convert_frame import compile_lock

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, MemplanError, UnsupportedCall
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.guards.module_state_guards import Structure
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.shared_arena import ArenaCoordinator, ArenaSlot, ObservedOwnership, part_of
from memplan.runtime.options import PlanOptions
from memplan.trace import stay_in_arena, trace_graph
from memplan.trace.capture.origins import user_of
from memplan.trace.capture.python_numbers import numbers_of, with_numbers
from memplan.trace.traced import TracedGraph

_MAX_PLANS = 8  # kept of a graph: one for each thread, and each shape where sizes vary
_MAX_IN_FLIGHT = 64  # calls of one graph whose backward is still to come


class GraphModuleWithParams(nn.Module):
    """A graph of dynamo's that keeps some inputs (by position, with names), and is called with the others."""

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
        """Run the graph as it is."""
        given = iter(rest)
        kept = {i: getattr(self, name) for i, name in self._kept.items()}
        return self.graph(*(kept[i] if i in kept else next(given) for i in range(len(rest) + len(kept))))

    def follow(self, inputs: Sequence[Any]) -> list[Any]:
        """Take over the parameters and buffers among the inputs of a call; the others."""
        for i, name in self._kept.items():
            (self._parameters if name in self._parameters else self._buffers)[name] = inputs[i]
        return [x for i, x in enumerate(inputs) if i not in self._kept]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether its parameters and buffers are those of this call."""
        return all(getattr(self, name) is inputs[i] for i, name in self._kept.items())


def _section_of(graph: fx.GraphModule) -> type[GraphModuleWithParams]:
    """A `GraphModuleWithParams` by the name of what the user has written: a plan and an error say of whom they are."""
    name = user_of(graph.graph)
    return (
        type(name, (GraphModuleWithParams,), {"__doc__": GraphModuleWithParams.__doc__})
        if name
        else GraphModuleWithParams
    )


class GraphInstance:
    """A section that is ready to run: one call of it can be in flight. `like`: another lane of the same graph."""

    def __init__(
        self,
        section: GraphModuleWithParams,
        inputs: Sequence[Any],
        options: PlanOptions,
        conductor: ArenaCoordinator,
        hooks: Hooks,
        *,
        owned: bool,
        like: GraphInstance | None,
    ) -> None:
        self.section = section
        self.ownership = ObservedOwnership(conductor, self)
        self.role: ArenaSlot | None = None
        self.layouts = 0
        self._options = options
        self._hooks = hooks
        self._owned = owned
        self._structure = Structure(self.section)
        rest = self.section.follow(inputs)
        self.traced: TracedGraph = _trace(self.section, rest, options) if like is None else like.traced
        self.plan: Plan = options.plan(self.traced) if like is None else like.plan
        self.runner: Runner
        with torch.inference_mode(False):
            arena = part_of(Arena(self.plan.arena_size, self.device), self.ownership)
            bound = None if like is None else like.runner.program.bound
            self.runner = self._run_in(self.plan, arena, bound)
        self.plan = self.runner.plan

    @property
    def device(self) -> torch.device:
        """Where its arena is."""
        return self.traced.device

    @property
    def idle(self) -> bool:
        """Whether it can run now: no backward of its own is to come, nor one whose activations it would overwrite."""
        return self.ownership.pending is None and not (self.role and self.role.disturbed(self, backward=False))

    def move(self, plan: Plan, arena: Arena) -> None:
        """As `shared.Lane.move`."""
        with torch.inference_mode(False):
            self.runner = self._run_in(plan, arena, self.runner.program.bound)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        transforms.refuse(inputs, self.section)
        leaves = self.runner.signature.flatten(tuple(self.section.follow(inputs)), {})
        return self.runner(leaves, training=self.traced.training)

    def _run_in(self, plan: Plan, arena: Arena, bound: tuple[BoundOp, ...] | None) -> Runner:
        return Runner(
            self._structure,
            self.traced,
            plan,
            arena,
            sanitize=self._options.sanitize,
            owned=self._owned,
            bound=bound,
            hooks=self._hooks,
        )


class PlannedGraph:
    """What dynamo calls in the place of a graph: planned at the first call, once more for each other shape."""

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        options: PlanOptions,
        conductors: ArenaCoordinators,
        hooks: Hooks,
        *,
        owned: bool,
    ) -> None:
        self._graph = graph
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._kept = {i: name for i, (name, x) in enumerate(zip(names, inputs, strict=True)) if _is_kept(x)}
        self._options = options
        self._hooks = hooks
        self._owned = owned
        self._conductors = conductors
        numbers = numbers_of(graph)
        self._numbers = {name: i for i, name in enumerate(names) if name in numbers}
        self._varies = any(_is_symbolic(n.meta.get("example_value")) for n in graph.graph.nodes)
        self._lanes: dict[Any, list[GraphInstance]] = {}

    @property
    def lanes(self) -> tuple[GraphInstance, ...]:
        """All lanes, in the order in which they were needed."""
        return tuple(lane for lanes in self._lanes.values() for lane in lanes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each shape that was called, as if it were alone."""
        return tuple(lanes[0].plan for lanes in self._lanes.values())

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph at planned addresses. Raises `UnsupportedGraph` when it cannot be planned."""
        conductor = self._conductors.mine()
        conductor.settle()
        numbers = {name: inputs[i].item() for name, i in self._numbers.items()}
        key = conductor, tuple(_layout(x) for x in inputs) if self._varies else (), repr(numbers)
        if key not in self._lanes:
            if len(self._lanes) == _MAX_PLANS:
                del self._lanes[next(iter(self._lanes))]
            self._lanes[key] = []
        return self._lane(self._lanes[key], conductor, inputs, numbers)(inputs)

    def _lane(
        self,
        lanes: list[GraphInstance],
        conductor: ArenaCoordinator,
        inputs: Sequence[Any],
        numbers: Mapping[str, float],
    ) -> GraphInstance:
        """An idle lane, best one with these very parameters, or a new one."""
        idle = [lane for lane in lanes if lane.idle]
        found = next((lane for lane in idle if lane.section.holds(inputs)), None)
        if found is None and len(lanes) >= _MAX_IN_FLIGHT:
            if not idle:
                what = f"{len(lanes)} calls of this graph wait for their backward"
                raise InputMismatch(what, where="the call", hint="run the backward, or call under torch.no_grad()")
            found = idle[0]
        if found is None:
            section = _section_of(self._graph)(with_numbers(self._graph, numbers), self._kept, inputs)
            like = lanes[0] if lanes else None
            with compile_lock:  # torch traces in one thread at a time
                found = GraphInstance(
                    section, inputs, self._options, conductor, self._hooks, owned=self._owned, like=like
                )
            lanes.append(found)
        return found


class ArenaCoordinators:
    """A conductor for each thread: threads take no turns, so they share no arena."""

    def __init__(self) -> None:
        self._local = threading.local()

    def mine(self) -> ArenaCoordinator:
        """That of the calling thread."""
        if not hasattr(self._local, "conductor"):
            self._local.conductor = ArenaCoordinator()
        found: ArenaCoordinator = self._local.conductor
        return found


class Backend:
    """A backend for `torch.compile` with options: `torch.compile(model, backend=memplan.Backend(sanitize="poison"))`.

    The options are those of `memplan.compile` that are about planning. Graphs that run in one step share one arena,
    laid out when the first step is complete. `budget`, `policy` and `costs` hold for each graph on its own:
    `BudgetInfeasible` is raised at the first call of a graph that cannot keep it, and `arena_size` tells what all
    of them need. `gradients="owned"`: each backward sets the `.grad` of its graph's parameters itself, with the limits
    that `memplan.compile` names; "arena" raises `UnsupportedCall`. `hooks` see the steps of all graphs. `graphs` are
    those that it was given and that are still in use, with their plans.
    """

    def __init__(self, *, gradients: str = "safe", **options: Any) -> None:
        self._asked = {"gradients": gradients, **options}
        self._options = PlanOptions(**options)
        self._owned = gradients == "owned"
        if stay_in_arena(gradients):
            what = "graphs of one step share an arena, and where one leaves gradients, the next one's backward runs"
            hint = 'memplan.compile(model, inputs, gradients="arena") takes a model that is one graph'
            raise UnsupportedCall(what, where=f"gradients={gradients!r}", hint=hint)
        if self._options.device is not None:
            hint = "memplan.compile(model, inputs, device=...) takes one"
            raise MemplanError("graphs of torch.compile run where they are", where="device", hint=hint)
        self.hooks = Hooks()
        self._conductors = ArenaCoordinators()
        self._graphs: list[weakref.ref[PlannedGraph]] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called by dynamo with each graph that it has traced."""
        planned = PlannedGraph(graph, inputs, self._options, self._conductors, self.hooks, owned=self._owned)
        self._graphs = [ref for ref in self._graphs if ref() is not None] + [weakref.ref(planned)]
        return planned

    def __reduce__(self) -> Any:
        """A copy (of a model that was compiled with it) has the same options, and nothing of what was compiled."""
        return _remade, (type(self), self._asked)

    @property
    def graphs(self) -> tuple[PlannedGraph, ...]:
        """In the order in which dynamo found them."""
        return tuple(graph for ref in self._graphs if (graph := ref()) is not None)

    @property
    def arena_size(self) -> int:
        """Bytes of all arenas that its graphs have now."""
        memories = {lane.runner.arena.memory for graph in self.graphs for lane in graph.lanes}
        return sum(memory.numel() for memory in memories)


def _remade(kind: type[Backend], options: dict[str, Any]) -> Backend:
    return kind(**options)


@functools.cache
def _default() -> Backend:
    return Backend()


def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`torch.compile(model, backend="memplan")`: the entry point, with default options."""
    return _default()(graph, inputs)


def _trace(section: GraphModuleWithParams, rest: Sequence[Any], options: PlanOptions) -> TracedGraph:
    """With its backward when autograd would record it now."""
    train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*section.parameters(), *rest))
    with torch.inference_mode(False):  # which enables gradients, too
        return trace_graph(section, tuple(rest), train=train, in_place=options.in_place)


def _is_kept(x: Any) -> bool:
    """Parameters, and what dynamo marks as a module's (buffers): their addresses stay, and gradients end there.

    What stands for a parameter and is none, as in `torch.func.functional_call`, is an input with a gradient.
    """
    if isinstance(x, nn.Parameter):
        return x.is_leaf
    return getattr(x, "_dynamo_static_input_type", None) is not None and not x.requires_grad


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _layout(x: Any) -> Any:
    return (x.shape, x.stride()) if isinstance(x, torch.Tensor) else x
