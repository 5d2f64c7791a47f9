"""`torch.compile(model, backend="memplan")`: every graph that dynamo finds is planned, forward and backward jointly.

Dynamo hands over graphs that take all tensors as inputs, parameters included. `Section` makes a module of such a
graph again, so that parameters are addresses in the generated code. A graph break leaves the activations of one
graph alive while the next runs, and one graph may run several times before its backward (layers that share their
code): each call that is in flight has a lane, which is a program with an arena of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

from memplan.errors import InputMismatch, MemplanError
from memplan.plan import Plan
from memplan.runtime.arena import Arena
from memplan.runtime.guards import GUARDS, redzone_of
from memplan.runtime.runner import Runner
from memplan.runtime.slots import Structure
from memplan.trace import alignment_of, plan_traced, trace_graph
from memplan.trace.traced import TracedGraph

_MAX_SHAPES = 8  # plans kept of a graph whose sizes vary
_MAX_IN_FLIGHT = 64  # calls of one graph whose backward is still to come


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """As in `memplan.compile`."""

    schedule: Any = "auto"
    solver: Any = "auto"
    time_limit: float | None = None
    in_place: bool = True
    guard: str | None = None

    def __post_init__(self) -> None:
        if self.guard not in (None, *GUARDS):
            raise MemplanError(f"guard={self.guard!r}", hint=f"choose one of: {', '.join(GUARDS)}")

    def trace(self, section: Section, rest: Sequence[Any]) -> TracedGraph:
        """With its backward when autograd would record it now."""
        train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*section.parameters(), *rest))
        with torch.inference_mode(False):  # which enables gradients, too
            return trace_graph(section, tuple(rest), train=train, in_place=self.in_place)

    def plan(self, traced: TracedGraph) -> Plan:
        redzone = redzone_of(self.guard, alignment_of(traced.device))
        return plan_traced(
            traced, redzone=redzone, schedule=self.schedule, solver=self.solver, time_limit=self.time_limit
        )


class Section(nn.Module):
    """A graph of dynamo's that keeps its parameters and buffers, and is called with the rest of its inputs."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> None:
        super().__init__()
        self.graph = graph
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._kept = {i: name for i, (name, x) in enumerate(zip(names, inputs, strict=True)) if _is_kept(x)}
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


class Lane:
    """A section that is ready to run, in an arena of its own. `like`: another lane of the same graph and shapes."""

    def __init__(self, graph: fx.GraphModule, inputs: Sequence[Any], options: Options, like: Lane | None) -> None:
        self.section = Section(graph, inputs)
        self.runner: Runner
        rest = self.section.follow(inputs)
        traced = options.trace(self.section, rest) if like is None else like.runner.traced
        plan = options.plan(traced) if like is None else like.runner.plan
        with torch.inference_mode(False):
            arena = Arena(plan.arena_size, traced.device)
            self.runner = Runner(Structure(self.section), traced, plan, arena, guard=options.guard)

    @property
    def idle(self) -> bool:
        """Whether no backward is still to come."""
        return self.runner.arena.ledger.pending is None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        leaves = self.runner.signature.flatten(tuple(self.section.follow(inputs)), {})
        return self.runner(leaves, training=self.runner.traced.training)


class PlannedGraph:
    """What dynamo calls in the place of a graph: planned at the first call, once more for each other shape."""

    def __init__(self, graph: fx.GraphModule, options: Options) -> None:
        self._graph = graph
        self._options = options
        self._varies = any(_is_symbolic(n.meta.get("example_value")) for n in graph.graph.nodes)
        self._lanes: dict[Any, list[Lane]] = {}

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All lanes, in the order in which they were needed."""
        return tuple(lane for lanes in self._lanes.values() for lane in lanes)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each shape that was called."""
        return tuple(lanes[0].runner.plan for lanes in self._lanes.values())

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph at planned addresses. Raises `UnsupportedGraph` when it cannot be planned."""
        key = tuple(_layout(x) for x in inputs) if self._varies else ()
        if key not in self._lanes:
            if len(self._lanes) == _MAX_SHAPES:
                del self._lanes[next(iter(self._lanes))]
            self._lanes[key] = []
        return self._lane(self._lanes[key], inputs)(inputs)

    def _lane(self, lanes: list[Lane], inputs: Sequence[Any]) -> Lane:
        """An idle lane, best one with these very parameters, or a new one."""
        idle = [lane for lane in lanes if lane.idle]
        found = next((lane for lane in idle if lane.section.holds(inputs)), None)
        if found is None and len(lanes) >= _MAX_IN_FLIGHT:
            if not idle:
                what = f"{len(lanes)} calls of this graph wait for their backward"
                raise InputMismatch(what, where="the call", hint="run the backward, or call under torch.no_grad()")
            found = idle[0]
        if found is None:
            lanes.append(Lane(self._graph, inputs, self._options, lanes[0] if lanes else None))
            found = lanes[-1]
        return found


class Backend:
    """A backend for `torch.compile` with options: `torch.compile(model, backend=memplan.Backend(guard="poison"))`.

    The options are those of `memplan.compile`. `graphs` are the graphs that it was given, with their plans.
    """

    def __init__(self, **options: Any) -> None:
        self._options = Options(**options)
        self.graphs: list[PlannedGraph] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Called by dynamo with each graph that it has traced."""
        planned = PlannedGraph(graph, self._options)
        self.graphs.append(planned)
        return planned


def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """`torch.compile(model, backend="memplan")`: the entry point, with default options."""
    return PlannedGraph(graph, Options())


def _is_kept(x: Any) -> bool:
    """Parameters, and what dynamo marks as a module's (buffers): their addresses stay."""
    return isinstance(x, nn.Parameter) or getattr(x, "_dynamo_static_input_type", None) is not None


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _layout(x: Any) -> Any:
    return (x.shape, x.stride()) if isinstance(x, torch.Tensor) else x
