"""`PlannedGraph`: the callable that replaces a graph of dynamo, and the programs that it runs.

At a graph break, the activations of one graph stay alive while the next one runs, and one graph may run several times
before its backward (layers that share code). Each call in flight has its own `GraphInstance`, which is a program. The
instances of one training step share one arena.

Programs refer to parameters and buffers, as their addresses are in the code. Where a model gets other ones (a mask that
is pruned once more, an adapter that is loaded), dynamo traces it again; the program of before would keep its tensors as
long as its graph is known. So `with_replaced_tensors` finds it.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memplan.core.choices import Gradients
from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.runtime.builder import ProgramBuilder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.split_graph import as_eager, nodes_at
from memplan.runtime.execute.instances import MAX_IN_FLIGHT, ProgramInstance, idle_instance
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import refused_calls
from memplan.runtime.guards.input_guards import kind_of
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import clear_gradients
from memplan.runtime.memory.shared_arena import ArenaCoordinator, PrepareStep
from memplan.runtime.options import RunOptions
from memplan.runtime.programs import Programs
from memplan.torch_inside.dynamo import compile_lock
from memplan.trace import capture_call
from memplan.trace.capture.origins import user_of
from memplan.trace.capture.refusals import runs_as_eager, where_it_breaks, why_it_breaks
from memplan.trace.default_kernels import with_kernels
from memplan.trace.traced import TracedGraph

_log = logging.getLogger("memplan")

_SEVERAL = (
    "%s: a step runs several graphs, or several calls of one, before their backward; gradients are outside of the "
    "arena from now on"
)


class ArenaCoordinators(threading.local):
    """The `coordinator` of each thread: threads run at the same time, so they cannot share an arena.

    `warned`: that so many calls wait that further ones run eagerly.
    """

    def __init__(self, prepare: PrepareStep | None = None) -> None:
        self.coordinator, self.warned = ArenaCoordinator(prepare), False

    def put_gradients_outside(self, graph: fx.GraphModule) -> None:
        """Have the gradients of all graphs outside of the arena from now on, in this thread."""
        if self.coordinator.gradients_in_arena:
            _log.info(_SEVERAL, named_class(graph).__name__)
        self.coordinator.gradients_in_arena = False


_NEW = 4  # calls of a graph, the first of which may be made twice
Divide = Callable[[fx.GraphModule, Sequence[Any], Sequence[fx.Node], str, str], Callable[..., Any] | None]


class GraphInstance(ProgramInstance):
    """A graph that is ready to run, with at most one call in flight.

    `module` has its parameters; `traced` is the graph as it was traced, before its plan. `inputs` and `results` are
    keys of what its first call took and returned, by which the joint plan knows what graphs pass to each other. `ends`:
    why the graph ends where it ends. `joint_budget`: the bytes that all graphs of its step may need together.
    `graph` refers to what runs it.
    """

    def __init__(self, module: GraphModuleWithParams, runner: Runner, *, ends: str, graph: PlannedGraph) -> None:
        super().__init__(runner)
        self.module, self.ends = module, ends
        self.graph = weakref.ref(graph)
        self.inputs: Mapping[int, Hashable] | None = None
        self.results: Mapping[int, Hashable] = {}
        self.joint_budget: int | None = None

    def __call__(self, inputs: Sequence[Any]) -> Any:
        refused_calls.refuse(inputs, self.module)
        rest = self.module.set_kept(inputs)
        leaves = self.runner.input_guards.flatten(tuple(rest), {})
        if self.inputs is not None:
            return self.runner(leaves, training=self.traced.training)
        assert self.ownership.coordinator is not None
        passed = self.ownership.coordinator.passed
        self.inputs = _by_position(rest, passed.taken)
        result = self.runner(leaves, training=self.traced.training)
        self.results = _by_position(pytree.tree_leaves(result), passed.returned)
        return result

    @property
    def traced(self) -> TracedGraph:
        """The graph as it was traced, before its plan."""
        return self.runner.as_traced

    def references(self) -> Iterator[torch.Tensor]:
        """Yield the parameters and buffers to which it refers, each as often as it does."""
        yield from self.module.tensors()

    def replace_plan(self, plan: Plan) -> None:
        """Run by another plan from now on, in an arena of its own. It is called while nothing is in flight."""
        arena = Arena(plan.arena_size, self.arena.device).part(self.ownership)
        with torch.inference_mode(False):
            self.runner = self.runner.replanned(plan, arena)
        self.plan = self.runner.plan


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
        divide: Divide,
        ends: str = "",
        whole: bool = False,
    ) -> None:
        """Make what replaces `graph`.

        `divide` returns what runs a graph in parts, around nodes that run as eager; its arguments are those of
        `Backend._divided`. `whole`: the graph is all of the function that dynamo traced.
        """
        self._graph = graph
        self._whole = whole
        self._ends = ends
        names = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
        self._kept = {i: name for i, (name, x) in enumerate(zip(names, inputs, strict=True)) if is_kept(x)}
        self._options = options
        self._hooks = hooks
        self._coordinators = coordinators
        self._varies = any(_is_symbolic(n.meta.get("example_value")) for n in graph.graph.nodes)
        self._programs: Programs[list[GraphInstance]] = Programs()  # by thread, and by shape if sizes vary
        self._retained: list[GraphInstance] = []  # that run no new calls, and whose backward may run (again)
        self._calls = 0
        self._divide = divide
        self._instead: Callable[..., Any] | None = None  # what runs where no plan can hold it

    @property
    def instances(self) -> tuple[GraphInstance, ...]:
        """All instances. Other threads may add some at the same time."""
        return tuple(instance for instances in self._programs for instance in tuple(instances))

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The plan of each shape so far, as if the graph had an arena of its own."""
        return tuple(instances[0].plan for instances in self._programs if instances)

    def __call__(self, *inputs: Any) -> Any:
        """Run the graph at planned addresses; what no plan can hold runs as eager, with a warning.

        Raises `UnsupportedGraph` where that would break a budget.
        """
        if self._instead is not None:
            return self._instead(*inputs)
        coordinator = self._coordinators.coordinator
        with coordinator.calling:
            clear_gradients(coordinator.left)
            if coordinator.waiting:  # the gradients of one would be in bytes that the backward of another needs
                self._coordinators.put_gradients_outside(self._graph)
            return self._call(coordinator, inputs)

    def _gradients_for(self, coordinator: ArenaCoordinator) -> Gradients:
        """Return where the gradients of the graph are now: in the arena while steps consist of this graph alone."""
        inside = self._whole and not self._options.has_budget and coordinator.gradients_in_arena
        return self._options.gradients if inside else "outside"

    def _call(self, coordinator: ArenaCoordinator, inputs: Sequence[Any]) -> Any:
        """Run a call at planned addresses; no other thread frees them meanwhile."""
        coordinator.place_last_step()
        if 0 < self._calls < _NEW:  # dynamo has traced it lately, perhaps again because tensors were replaced
            _drop_replaced(coordinator)
        self._calls += 1
        how = self._gradients_for(coordinator)
        kind = coordinator, tuple(map(kind_of, inputs)) if self._varies else (), how
        instances = self._programs.find(kind)
        if instances is None:  # those of other gradients have run for the last time
            self._retain(self._programs.drop(lambda k: k[0] is coordinator and k[-1] != how))
            if kind[1] and len(self._programs):
                shown = [tuple(x.shape) for i, x in enumerate(inputs) if i not in self._kept and hasattr(x, "shape")]
                _log.info("%s is planned again, for other sizes: %s", named_class(self._graph).__name__, shown)
            instances = self._programs.of(kind, list)
        try:
            instance = self._instance(instances, coordinator, inputs, how)
        except UnsupportedGraph as refused:
            if self._options.has_budget or not runs_as_eager(refused):
                raise
            self._instead = self._without_plan(refused, inputs)
            self._retain(self._programs.drop(lambda _: True))
            return self._instead(*inputs)
        return self._graph(*inputs) if instance is None else instance(inputs)

    def _without_plan(self, refused: UnsupportedGraph, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return what runs the graph as eager, or as parts of which only what was refused does; log it."""
        place, why = where_it_breaks(refused), why_it_breaks(refused)
        apart = self._divide(self._graph, inputs, nodes_at(self._graph, place), why, self._ends)
        what = "a part of" if apart else "a graph of"
        _log.warning("%s %s runs as eager: %s: %s", what, named_class(self._graph).__name__, refused.where, why)
        return apart or as_eager(self._graph)

    def known(self) -> tuple[GraphInstance, ...]:
        """Return all instances, and those that stay for a backward of theirs; others of that kind are dropped."""
        self._retain(())
        return (*self.instances, *self._retained)

    def drop(self, instance: GraphInstance) -> None:
        """Drop an instance, apart from a backward of its that may still run."""
        for instances in self._programs:
            if instance in instances:
                instances.remove(instance)
                self._retain([[instance]])

    def _retain(self, dropped: Sequence[list[GraphInstance]]) -> None:
        """Keep those of the instances to which an autograd graph refers: their backward may run (again)."""
        self._retained = [one for of in (self._retained, *dropped) for one in of if one.ownership.has_graph]

    def _instance(
        self,
        instances: list[GraphInstance],
        coordinator: ArenaCoordinator,
        inputs: Sequence[Any],
        gradients: Gradients,
    ) -> GraphInstance | None:
        """Return an idle instance, preferably one with the same parameters, or a new one; None beyond the limit."""

        def make(like: GraphInstance | None) -> GraphInstance:
            """Return a new instance; the trace, the plan and the bound ops of another one are reused."""
            module = named_class(self._graph)(self._graph, self._kept, inputs)
            with compile_lock:  # torch can trace in one thread at a time
                if like is not None:
                    module.set_kept(inputs)
                    runner = like.another(coordinator, ModuleGuards(module))
                else:
                    options = replace(self._options, gradients=gradients)
                    runner = first_program_of(module, inputs, options, coordinator, self._hooks)
                return GraphInstance(module, runner, ends=self._ends, graph=self)

        found = idle_instance(
            instances,
            coordinator,
            make,
            most=MAX_IN_FLIGHT,
            first=lambda one: one.module.holds(inputs),
            may_move=not self._options.has_budget,
        )
        if found is None and not self._coordinators.warned:
            self._coordinators.warned = True
            what = "%s: %d calls of a graph wait for their backward; further ones run eagerly"
            _log.warning(what, instances[0].plan.model, len(instances))
        return found


def _drop_replaced(coordinator: ArenaCoordinator) -> None:
    """Drop the instances of a thread that have tensors of before, which nothing else has any more."""
    graphs = {one.graph() for one in tuple(coordinator.members) if isinstance(one, GraphInstance)}
    known = [one for graph in graphs if graph is not None for one in graph.known()]
    for one in with_replaced_tensors(known):
        graph = one.graph()
        if graph is not None:
            graph.drop(one)


def _by_position(
    leaves: Sequence[Any], keys_of: Callable[[list[torch.Tensor]], tuple[Hashable, ...]]
) -> dict[int, Hashable]:
    """Return a key of each tensor among leaves, by its position."""
    tensors = {i: x for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)}
    return dict(zip(tensors, keys_of(list(tensors.values())), strict=True))


def _is_symbolic(x: Any) -> bool:
    return isinstance(x, (torch.SymInt, torch.SymFloat, torch.SymBool))


def with_replaced_tensors(instances: Iterable[GraphInstance]) -> list[GraphInstance]:
    """Return the instances that have a parameter or buffer to which only these instances refer.

    A program that is dropped by mistake, for a tensor that code in C++ has, is made again when it is called.

    Args:
        instances: All instances that may refer to the same tensors.
    """
    instances = list(instances)
    known = Counter(id(tensor) for instance in instances for tensor in instance.references())
    found = []
    for instance in instances:
        tensors = instance.module.tensors()
        if any(count <= known[id(tensor)] for count, tensor in zip(_references(tensors), tensors, strict=True)):
            found.append(instance)
    return found


def _references(objects: list[Any]) -> list[int]:
    """Return how many references each object has, but for that of the list, and those of who counts."""
    counts, (own,) = ([sys.getrefcount(each) for each in counted] for counted in (objects, [object()]))
    return [count - own for count in counts]


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
) -> Runner:
    """Return the first program of a graph, which is planned and tried.

    `options`: with `gradients` as they are for this graph.
    """
    rest = module.set_kept(inputs)
    placed = next((x for x in (*module.tensors(), *rest) if is_traceable_wrapper_subclass(x)), None)
    if placed is not None:
        what = f"an input of type {type(placed).__name__}, behind which there are other tensors"
        hint = "use memplan.compile or compile_step, which plan what parallelize_module and fully_shard divide"
        raise UnsupportedGraph(type(module).__name__, what, hint, see="inputs")
    # with its backward if autograd would record the call
    train = torch.is_grad_enabled() and any(_wants_gradient(x) for x in (*module.parameters(), *rest))
    options = with_kernels(options, module, rest)
    builder = ProgramBuilder(options, type(module).__name__, hooks, coordinator, added=options.gradients_copied)
    builder.guards = ModuleGuards(module)
    keep = options.has_budget  # a joint plan of all graphs may be tried on the example; else nobody may hold it

    def make() -> Runner:
        """Return the program, traced, planned and tried."""
        captured = capture_call(module, tuple(rest), by_dynamo=True, train=train, **builder.options.tracing)
        captured.warn()
        return builder.program(captured.retrace(), None, keep_example=keep)[0]

    return builder.by_default(make)


def _wants_gradient(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.requires_grad
