"""The backend of `torch.compile(model, backend="memplan")`: plans every graph of dynamo, forward and backward jointly.

The graphs of dynamo take all tensors as inputs, parameters included. `GraphModuleWithParams` turns such a graph into a
module again, so that parameters are addresses in the generated code. At a graph break, the activations of one graph
stay alive while the next one runs, and one graph may run several times before its backward (layers that share code).
Each call in flight has its own `GraphInstance`, which is a program. The instances of one training step share one arena.
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

_MAX_PLANS = 8  # of a graph, that are kept: one for each thread, and for each shape if sizes vary
_MAX_IN_FLIGHT = 64  # calls of one graph whose backward has not run


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
        """Run the graph with the kept inputs and `rest`."""
        given = iter(rest)
        kept = {i: getattr(self, name) for i, name in self._kept.items()}
        return self.graph(*(kept[i] if i in kept else next(given) for i in range(len(rest) + len(kept))))

    def follow(self, inputs: Sequence[Any]) -> list[Any]:
        """Set the parameters and buffers to those among the inputs of a call; return the other inputs."""
        for i, name in self._kept.items():
            (self._parameters if name in self._parameters else self._buffers)[name] = inputs[i]
        return [x for i, x in enumerate(inputs) if i not in self._kept]

    def holds(self, inputs: Sequence[Any]) -> bool:
        """Whether the parameters and buffers are those among `inputs`."""
        return all(getattr(self, name) is inputs[i] for i, name in self._kept.items())


def _named_class(graph: fx.GraphModule) -> type[GraphModuleWithParams]:
    """Return a subclass of `GraphModuleWithParams` with the name of the user's module, for plans and errors."""
    name = user_of(graph.graph)
    return (
        type(name, (GraphModuleWithParams,), {"__doc__": GraphModuleWithParams.__doc__})
        if name
        else GraphModuleWithParams
    )


class GraphInstance:
    """A graph that is ready to run, with at most one call in flight.

    `like`: another instance of the same graph, whose trace, plan and bound ops are reused.
    """

    def __init__(
        self,
        module: GraphModuleWithParams,
        inputs: Sequence[Any],
        options: PlanOptions,
        coordinator: ArenaCoordinator,
        hooks: Hooks,
        *,
        owned: bool,
        like: GraphInstance | None,
    ) -> None:
        self.module = module
        self.ownership = ObservedOwnership(coordinator, self)
        self.role: ArenaSlot | None = None
        self.layouts = 0
        self._options = options
        self._hooks = hooks
        self._owned = owned
        self._structure = Structure(self.module)
        rest = self.module.follow(inputs)
        self.traced: TracedGraph = _trace(self.module, rest, options) if like is None else like.traced
        self.plan: Plan = options.plan(self.traced) if like is None else like.plan
        self.runner: Runner
        with torch.inference_mode(False):
            arena = part_of(Arena(self.plan.arena_size, self.device), self.ownership)
            bound = None if like is None else like.runner.program.bound
            self.runner = self._run_in(self.plan, arena, bound)
        self.plan = self.runner.plan

    @property
    def device(self) -> torch.device:
        """The device of its arena."""
        return self.traced.device

    @property
    def idle(self) -> bool:
        """Whether it can run now: it is not in flight, and would not overwrite activations of an instance that is."""
        return self.ownership.pending is None and not (self.role and self.role.disturbed(self, backward=False))

    def move(self, plan: Plan, arena: Arena) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while nothing is in flight."""
        with torch.inference_mode(False):
            self.runner = self._run_in(plan, arena, self.runner.program.bound)

    def __call__(self, inputs: Sequence[Any]) -> Any:
        transforms.refuse(inputs, self.module)
        leaves = self.runner.signature.flatten(tuple(self.module.follow(inputs)), {})
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
    """The callable that replaces a graph of dynamo. It is planned at the first call, and again for each new shape."""

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        options: PlanOptions,
        coordinators: ArenaCoordinators,
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
        self._conductors = coordinators
        numbers = numbers_of(graph)
        self._numbers = {name: i for i, name in enumerate(names) if name in numbers}
        self._varies = any(_is_symbolic(n.meta.get("example_value")) for n in graph.graph.nodes)
        self._lanes: dict[Any, list[GraphInstance]] = {}

    @property
    def lanes(self) -> tuple[GraphInstance, ...]:
        """All instances, in the order in which they were made."""
        return tuple(lane for lanes in self._lanes.values() for lane in lanes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each shape so far, as if the graph had an arena of its own."""
        return tuple(lanes[0].plan for lanes in self._lanes.values())

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph at planned addresses. Raises `UnsupportedGraph` when it cannot be planned."""
        coordinator = self._conductors.mine()
        coordinator.settle()
        numbers = {name: inputs[i].item() for name, i in self._numbers.items()}
        key = coordinator, tuple(_layout(x) for x in inputs) if self._varies else (), repr(numbers)
        if key not in self._lanes:
            if len(self._lanes) == _MAX_PLANS:
                del self._lanes[next(iter(self._lanes))]
            self._lanes[key] = []
        return self._lane(self._lanes[key], coordinator, inputs, numbers)(inputs)

    def _lane(
        self,
        lanes: list[GraphInstance],
        coordinator: ArenaCoordinator,
        inputs: Sequence[Any],
        numbers: Mapping[str, float],
    ) -> GraphInstance:
        """Return an idle instance, preferably one with the same parameters, or a new one."""
        idle = [lane for lane in lanes if lane.idle]
        found = next((lane for lane in idle if lane.module.holds(inputs)), None)
        if found is None and len(lanes) >= _MAX_IN_FLIGHT:
            if not idle:
                what = f"{len(lanes)} calls of this graph wait for their backward"
                raise InputMismatch(what, where="the call", hint="run the backward, or call under torch.no_grad()")
            found = idle[0]
        if found is None:
            module = _named_class(self._graph)(with_numbers(self._graph, numbers), self._kept, inputs)
            like = lanes[0] if lanes else None
            with compile_lock:  # torch can trace in one thread at a time
                found = GraphInstance(
                    module, inputs, self._options, coordinator, self._hooks, owned=self._owned, like=like
                )
            lanes.append(found)
        return found


class ArenaCoordinators:
    """An `ArenaCoordinator` for each thread: threads run at the same time, so they cannot share an arena."""

    def __init__(self) -> None:
        self._local = threading.local()

    def mine(self) -> ArenaCoordinator:
        """Return the coordinator of the calling thread."""
        if not hasattr(self._local, "coordinator"):
            self._local.coordinator = ArenaCoordinator()
        found: ArenaCoordinator = self._local.coordinator
        return found


class Backend:
    """A backend for `torch.compile`, with options.

    Graphs that run in one training step share one arena, which is laid out when the first step is complete. `budget`,
    `policy` and `costs` apply to each graph on its own: a graph that cannot keep the budget raises `BudgetInfeasible`
    at its first call.

    Args:
        gradients: "safe" returns gradients to autograd. "owned": each backward assigns the `.grad` of its graph's
            parameters itself, with the limits that `memplan.compile` names.
        options: The options of `memplan.compile` that decide how a step is planned and checked: `budget`, `policy`,
            `costs`, `divide`, `compress`, `schedule`, `solver`, `layout`, `time_limit`, `in_place`, `sanitize`.

    Attributes:
        hooks: The hooks that are called with the events of all graphs.

    Raises:
        UnsupportedCall: `gradients="arena"`, which a step of several graphs cannot support.
        MemplanError: `device` is set, or an option has an unknown value.

    Example:
        ```python
        backend = memplan.Backend(sanitize="poison")
        compiled = torch.compile(model, backend=backend)
        compiled(inputs)
        print(backend.arena_size)  # bytes
        ```
    """

    def __init__(self, *, gradients: str = "safe", **options: Any) -> None:
        self._arguments = {"gradients": gradients, **options}
        self._options = PlanOptions(**options)
        self._owned = gradients == "owned"
        if stay_in_arena(gradients):
            what = "graphs of one step share an arena, so a backward would overwrite the gradients of another graph"
            hint = 'memplan.compile(model, inputs, gradients="arena") takes a model that is one graph'
            raise UnsupportedCall(what, where=f"gradients={gradients!r}", hint=hint, see="backend")
        if self._options.device is not None:
            hint = "memplan.compile(model, inputs, device=...) takes one"
            raise MemplanError("graphs of torch.compile run where they are", where="device", hint=hint, see="backend")
        self.hooks = Hooks()
        self._conductors = ArenaCoordinators()
        self._graphs: list[weakref.ref[PlannedGraph]] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the callable that replaces a graph; dynamo calls this with each graph that it has traced."""
        planned = PlannedGraph(graph, inputs, self._options, self._conductors, self.hooks, owned=self._owned)
        self._graphs = [ref for ref in self._graphs if ref() is not None] + [weakref.ref(planned)]
        return planned

    def __reduce__(self) -> Any:
        """Return what makes a copy: it has the same options, and no compiled graphs."""
        return _remade, (type(self), self._arguments)

    @property
    def graphs(self) -> tuple[PlannedGraph, ...]:
        """The graphs that are still in use, with their plans, in the order in which dynamo traced them."""
        return tuple(graph for ref in self._graphs if (graph := ref()) is not None)

    @property
    def arena_size(self) -> int:
        """The bytes of all arenas that its graphs have now."""
        memories = {lane.runner.arena.memory for graph in self.graphs for lane in graph.lanes}
        return sum(memory.numel() for memory in memories)


def _remade(kind: type[Backend], options: dict[str, Any]) -> Backend:
    return kind(**options)


@functools.cache
def _default() -> Backend:
    return Backend()


def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the callable that replaces a graph: the entry point of `backend="memplan"`, with default options."""
    return _default()(graph, inputs)


def _trace(module: GraphModuleWithParams, rest: Sequence[Any], options: PlanOptions) -> TracedGraph:
    """Return the trace of a graph, with its backward if autograd would record the call."""
    train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*module.parameters(), *rest))
    with torch.inference_mode(False):  # this enables gradients, too
        return trace_graph(module, tuple(rest), train=train, in_place=options.in_place)


def _is_kept(x: Any) -> bool:
    """Whether an input is a leaf parameter or a buffer, whose address rarely changes.

    A tensor that replaces a parameter, as in `torch.func.functional_call`, is an input with a gradient.
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
