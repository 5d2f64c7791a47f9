"""`PlannedGraph`: the callable that replaces a graph of dynamo, and the programs that it runs.

At a graph break, the activations of one graph stay alive while the next one runs, and one graph may run several times
before its backward (layers that share code). Each call in flight has its own `GraphInstance`, which is a program. The
instances of one training step share one arena.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._dynamo.convert_frame import compile_lock

from memplan.core.plan import Plan
from memplan.errors import InputMismatch, UnsupportedGraph
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.crossings import Crossings
from memplan.runtime.dynamo.graph_module import GraphModuleWithParams, is_kept, named_class
from memplan.runtime.dynamo.residents import Residents
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.runtime.measured_budget import Built, Measured, adopt_need, build_measured, plan_as_small_as_eager, replan
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.shared_arena import ArenaCoordinator, ArenaSlot, ObservedOwnership, PrepareStep, part_of
from memplan.runtime.options import RunOptions
from memplan.trace import trace_graph
from memplan.trace.capture.checkpoint_warnings import gradients_that_eager_lacks
from memplan.trace.capture.python_numbers import numbers_of, with_numbers
from memplan.trace.capture.refusals import why_it_breaks
from memplan.trace.traced import TracedGraph

_log = logging.getLogger("memplan")
_MAX_PLANS = 8  # of a graph, that are kept: one for each thread, and for each shape if sizes vary
_DATA_DEPENDENT = ("data-dependent", "data-dependent-size")  # headings of refusals
_MAX_IN_FLIGHT = 64  # calls of one graph whose backward has not run


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphRecipe:
    """What makes an instance of a graph without tracing and planning it again."""

    traced: TracedGraph
    plan: Plan
    bound: tuple[BoundOp, ...]


class GraphInstance:
    """A graph that is ready to run, with at most one call in flight.

    `like`: the trace, plan and bound ops of another instance of the same graph. `residents`: the instances of this
    thread. `crossings`: what the graphs
    pass to each other. `ends`: why the graph ends where it ends.
    """

    def __init__(
        self,
        module: GraphModuleWithParams,
        inputs: Sequence[Any],
        options: RunOptions,
        coordinator: ArenaCoordinator,
        hooks: Hooks,
        *,
        crossings: Crossings,
        ends: str,
        residents: Residents,
        like: GraphRecipe | None,
    ) -> None:
        self.module = module
        self.ends = ends
        self.inputs: Mapping[int, Hashable] | None = None  # keys of what its first call took and returned
        self.results: Mapping[int, Hashable] = {}
        self.last_step = 0
        self.joint_budget: int | None = None  # bytes that all graphs of its step may need together
        self._crossings = crossings
        self._residents = residents
        self.ownership = ObservedOwnership(coordinator, self)
        self.slot: ArenaSlot | None = None
        self.layouts = 0
        self._options = options
        self._hooks = hooks
        self._module_guards = ModuleGuards(self.module)
        rest = self.module.set_kept(inputs)
        self.traced: TracedGraph = _trace(self.module, rest, options) if like is None else like.traced
        self.plan: Plan
        self.runner: Runner
        with torch.inference_mode(False):
            if like is None:
                self.runner = self._as_small_as_eager(build_measured(self._build, 1)[0])
            else:
                self.runner = self._run_apart(like.plan, like.bound)
        self.plan = self.runner.plan
        residents.add(self)

    @property
    def recipe(self) -> GraphRecipe:
        """What makes another instance of the same graph."""
        return GraphRecipe(traced=self.traced, plan=self.plan, bound=self.runner.program.bound)

    @property
    def keeps(self) -> bool:
        """Whether it has a backward."""
        return self.traced.training

    @property
    def arena(self) -> Arena:
        """The arena that it runs in."""
        return self.runner.arena

    @property
    def device(self) -> torch.device:
        """The device of its arena."""
        return self.traced.device

    @property
    def idle(self) -> bool:
        """Whether it can run now: it is not in flight, and would not overwrite activations of an instance that is."""
        if not self.keeps and self.slot is None:
            return self._residents.is_free(self.arena)
        return self.ownership.pending is None and not (self.slot and self.slot.overwritten_by(self, backward=False))

    def share(self) -> None:
        """Move into another program's arena, if it has no backward, an arena of its own, and another one is free."""
        if self.keeps or self.slot is not None or len(list(self._residents.of(self.arena))) > 1:
            return
        if (free := self._residents.free_arena(self.plan.arena_size, self.device, but=self)) is not None:
            self.move(self.plan, part_of(free, self.ownership))

    def move(self, plan: Plan, arena: Arena) -> None:
        """Run from now on at the offsets of `plan` in `arena`. It is called while nothing is in flight."""
        with torch.inference_mode(False):
            self.runner = self._run_in(plan, arena, self.runner.program.bound)

    def replace_plan(self, plan: Plan) -> None:
        """Run by another plan from now on, in an arena of its own. It is called while nothing is in flight."""
        with torch.inference_mode(False):
            self.runner = self._run_apart(plan)
        self.plan = self.runner.plan

    def __call__(self, inputs: Sequence[Any]) -> Any:
        transforms.refuse(inputs, self.module)
        rest = self.module.set_kept(inputs)
        leaves = self.runner.input_guards.flatten(tuple(rest), {})
        if self.inputs is not None:
            return self.runner(leaves, training=self.traced.training)
        self.inputs = self._crossings.keys_of(rest)
        result = self.runner(leaves, training=self.traced.training)
        self.results = self._crossings.returned(id(self), result)
        return result

    def _build(self, known: Sequence[Measured | None]) -> Sequence[Built]:
        """Return the program in an arena of its own, planned with what is measured of it."""
        options, traced = self._options, self.traced
        _, plan = options.settle(traced, None) if known[0] is None else replan(options, known[0])
        runner = self._run_apart(plan)
        if options.budget == "min":
            adopt_need(runner)
        return (Built(traced=traced, runner=runner),)

    def _as_small_as_eager(self, built: Built) -> Runner:
        """Return a program that needs no more than eager is predicted to need, where no budget is given."""
        options = self._options
        smaller = None if options.has_budget else plan_as_small_as_eager(options, built)
        return built.runner if smaller is None else self._run_apart(smaller[1])

    def _run_apart(self, plan: Plan, bound: tuple[BoundOp, ...] | None = None) -> Runner:
        free = None if self.keeps else self._residents.free_arena(plan.arena_size, self.device)
        return self._run_in(plan, part_of(free or Arena(plan.arena_size, self.device), self.ownership), bound)

    def _run_in(self, plan: Plan, arena: Arena, bound: tuple[BoundOp, ...] | None) -> Runner:
        return Runner(
            self._module_guards,
            self.traced,
            plan,
            arena,
            sanitize=self._options.sanitize,
            gradients=self._options.gradients,
            bound=bound,
            hooks=self._hooks,
        )


class PlannedGraph:
    """The callable that replaces a graph of dynamo. It is planned at the first call, and again for each new shape."""

    def __init__(
        self,
        graph: fx.GraphModule,
        inputs: Sequence[Any],
        options: RunOptions,
        coordinators: ArenaCoordinators,
        hooks: Hooks,
        *,
        crossings: Crossings,
        ends: str = "",
        on_step: Callable[[], None],
    ) -> None:
        self._graph = graph
        self._on_step = on_step
        self._crossings = crossings
        self._ends = ends
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._kept = {i: name for i, (name, x) in enumerate(zip(names, inputs, strict=True)) if is_kept(x)}
        self._options = options
        self._hooks = hooks
        self._coordinators = coordinators
        numbers = numbers_of(graph)
        self._numbers = {name: i for i, name in enumerate(names) if name in numbers}
        self._varies = any(_is_symbolic(n.meta.get("example_value")) for n in graph.graph.nodes)
        self._instances: dict[Any, list[GraphInstance]] = {}
        self._recipes: dict[Any, GraphRecipe] = {}
        self._eager = False  # whether no trace can hold it
        for warning in gradients_that_eager_lacks(graph.graph) if torch.is_grad_enabled() else ():
            _log.warning("%s", warning)

    @property
    def instances(self) -> tuple[GraphInstance, ...]:
        """All instances, in the order in which they were made."""
        return tuple(instance for instances in self._instances.values() for instance in instances)

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each shape so far, as if the graph had an arena of its own."""
        return tuple(recipe.plan for recipe in self._recipes.values())

    def drop_stale(self, residents: Residents) -> None:
        """Free the arenas of instances that the last training steps did not call."""
        for key, instances in self._instances.items():
            self._instances[key] = [one for one in instances if not one.keeps or not residents.stale(one)]

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph at planned addresses, or eagerly where the shapes of its backward depend on data.

        Raises `UnsupportedGraph` when it cannot be planned for another reason, or has to keep a budget.
        """
        if self._eager:
            return self._graph(*inputs)
        coordinator = self._coordinators.of_this_thread()
        coordinator.place_last_step()
        numbers = {name: inputs[i].item() for name, i in self._numbers.items()}
        key = coordinator, tuple(_layout(x) for x in inputs) if self._varies else (), repr(numbers)
        if key not in self._instances:
            if len(self._instances) == _MAX_PLANS:
                oldest = next(iter(self._instances))
                del self._instances[oldest]
                self._recipes.pop(oldest, None)
            self._instances[key] = []
        try:
            instance = self._instance(key, coordinator, inputs, numbers)
        except UnsupportedGraph as refused:
            if refused.see not in _DATA_DEPENDENT or self._options.has_budget:
                raise
            _log.warning("%s runs as eager: %s", refused.where, why_it_breaks(refused))
            self._eager = True
            return self._graph(*inputs)
        if self._coordinators.residents.enter(instance):
            self._on_step()
        return instance(inputs)

    def _instance(
        self,
        key: Any,
        coordinator: ArenaCoordinator,
        inputs: Sequence[Any],
        numbers: Mapping[str, float],
    ) -> GraphInstance:
        """Return an idle instance, preferably one with the same parameters, or a new one."""
        instances = self._instances[key]
        idle = [instance for instance in instances if instance.idle]
        found = next((instance for instance in idle if instance.module.holds(inputs)), None)
        if found is None and len(instances) >= _MAX_IN_FLIGHT:
            if not idle:
                what = f"{len(instances)} calls of this graph wait for their backward"
                raise InputMismatch(what, where="the call", hint="run the backward, or call under torch.no_grad()")
            found = idle[0]
        if found is not None:
            found.share()
        if found is None:
            module = named_class(self._graph)(with_numbers(self._graph, numbers), self._kept, inputs)
            with compile_lock:  # torch can trace in one thread at a time
                found = GraphInstance(
                    module,
                    inputs,
                    self._options,
                    coordinator,
                    self._hooks,
                    crossings=self._crossings,
                    ends=self._ends,
                    residents=self._coordinators.residents,
                    like=instances[0].recipe if instances else self._recipes.get(key),
                )
            instances.append(found)
            self._recipes[key] = found.recipe
        return found


class ArenaCoordinators:
    """An `ArenaCoordinator` and `Residents` for each thread: threads run at the same time, so they share no arena."""

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self._local = threading.local()
        self._prepare = prepare

    def of_this_thread(self) -> ArenaCoordinator:
        """Return the coordinator of the calling thread."""
        if not hasattr(self._local, "coordinator"):
            self._local.coordinator = ArenaCoordinator(self._prepare)
        found: ArenaCoordinator = self._local.coordinator
        return found

    @property
    def residents(self) -> Residents:
        """The instances of the calling thread."""
        if not hasattr(self._local, "residents"):
            self._local.residents = Residents()
        found: Residents = self._local.residents
        return found


def _trace(module: GraphModuleWithParams, rest: Sequence[Any], options: RunOptions) -> TracedGraph:
    """Return the trace of a graph, with its backward if autograd would record the call."""
    train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*module.parameters(), *rest))
    with torch.inference_mode(False):  # this enables gradients, too
        return trace_graph(module, tuple(rest), train=train, in_place=options.in_place)


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad


def _layout(x: Any) -> Any:
    return (x.shape, x.stride()) if isinstance(x, torch.Tensor) else x
