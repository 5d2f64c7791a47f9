"""The backend of `torch.compile(model, backend="memplan")`, which plans forward and backward of every graph jointly.

`SeveralGraphs`: runs a model as the graphs into which dynamo breaks it, in one planned arena.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Unpack

import torch
from torch import fx, nn

from memplan.core.plan import Plan
from memplan.errors import UnsupportedCall, UnsupportedGraph
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.joint_plan import joint_plan, keep_budgets
from memplan.runtime.dynamo.planned_graph import ArenaCoordinators, PlannedGraph, named_class
from memplan.runtime.dynamo.split_graph import as_eager, example_inputs, masked_writes, split_around
from memplan.runtime.memory.shared_arena import release_arenas
from memplan.runtime.options import CompileOptions, RunOptions
from memplan.torch_inside.dynamo import dynamo_config, why_traced_again
from memplan.torch_inside.versions import compile_limits
from memplan.trace.capture.constant_masks import drop_constant_masks
from memplan.trace.capture.origins import why_it_ends
from memplan.trace.capture.refusals import breaks, runs_as_eager

if TYPE_CHECKING:
    from memplan.core.choices import Gradients
    from memplan.runtime.options import RunKeywords

_log = logging.getLogger("memplan")


class Backend:
    """A backend for `torch.compile`, with options.

    Graphs that run in one training step share one arena, which is laid out when the first step is complete. A budget
    holds for each graph from its first call on, and for all graphs of a step together from the second step on:
    `BudgetInfeasible` is raised at the call of a graph that cannot keep it, or when the second step begins. `policy`
    and `costs` apply to each graph on its own.

    Args:
        gradients: "arena": without a budget, a graph that is the whole model keeps its gradients in the arena until
            the next step begins. "outside": they are tensors of the caller, as those of graphs that end at a graph
            break, and from the first step on that runs several graphs.
        options: The options of `memplan.compile` that decide how a step is planned and checked: `budget`,
            `arena_budget`, `host_budget`, `pinned_budget`, `reserve`, `policy`, `costs`, `checkpoint`, `kernels`,
            `device`, `schedule`, `solver`, `layout`, `time_limit`, `in_place`, `sanitize`.

    Attributes:
        hooks: The hooks that are called with the events of all graphs.

    Raises:
        UnsupportedCall: `divide` or `compress`, which several graphs cannot support.
        MemplanError: An option has an unknown value.

    Example:
        ```python
        backend = memplan.Backend(sanitize="poison")
        compiled = torch.compile(model, backend=backend)
        compiled(inputs)
        print(backend.arena_size)  # bytes
        ```
    """

    def __init__(self, *, gradients: Gradients = "arena", **options: Unpack[RunKeywords]) -> None:
        self._arguments = {"gradients": gradients, **options}
        for name in ("divide", "compress"):
            if options.get(name):
                hint = f"use memplan.compile(model, inputs, {name}=...), for a model that is one graph"
                raise UnsupportedCall(
                    "a graph of dynamo is traced once, as it is", where=name, hint=hint, see="backend"
                )
        self._options = RunOptions(gradients=gradients, **options)
        self.hooks = Hooks()
        limited = self._options.budget is not None or self._options.arena_budget is not None
        self._coordinators = ArenaCoordinators(functools.partial(keep_budgets, self._options) if limited else None)
        self._graphs: list[weakref.ref[PlannedGraph]] = []

    def __call__(self, graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Return the callable that replaces a graph; dynamo calls this with each graph that it has traced."""
        if drop_constant_masks(graph.graph):
            graph.recompile()
        if again := why_traced_again():
            _log.info("%s is planned again, because dynamo has traced it again: %s", named_class(graph).__name__, again)
        last = why_it_ends(graph)
        why = "the shape of a gradient depends on a mask"
        return self._divided(graph, inputs, masked_writes(graph), why, last) or self._planned(
            graph, inputs, last, whole=not last
        )

    def _divided(
        self, graph: fx.GraphModule, inputs: Sequence[Any], eager: Collection[fx.Node], why: str, last: str
    ) -> Callable[..., Any] | None:
        """Return what runs a graph in parts, around the nodes that run as `eager`; None if it cannot be divided.

        `why`: why the parts before these nodes end. `last`: why the graph ends.
        """
        divided = split_around(graph, eager)
        if divided is None:
            return None
        whole, parts = divided
        known = {str(n.target): x for n, x in zip(graph.graph.find_nodes(op="placeholder"), inputs, strict=True)}
        ends = [*(f"{after.place}: {why}" for after in parts[1:]), last]
        for part, end in zip(parts, ends, strict=True):
            module = getattr(whole, part.name)
            delattr(whole, part.name)  # what runs it may be no module
            run = as_eager(module) if part.eager else self._planned(module, example_inputs(module, known), end)
            setattr(whole, part.name, run)
        return whole

    def _planned(self, graph: fx.GraphModule, inputs: Sequence[Any], ends: str, *, whole: bool = False) -> PlannedGraph:
        """Return the callable of one graph, and remember it as long as it is in use."""
        planned = PlannedGraph(
            graph,
            inputs,
            self._options,
            self._coordinators,
            self.hooks,
            divide=self._divided,
            ends=ends,
            whole=whole,
        )
        self._graphs = [ref for ref in self._graphs if ref() is not None] + [weakref.ref(planned)]
        return planned

    def __reduce__(self) -> Any:
        """Return what makes a copy: it has the same options, and no compiled graphs."""
        return _remade, (type(self), self._arguments)

    @property
    def graphs(self) -> tuple[PlannedGraph, ...]:
        """The graphs that are still in use, with their plans, in the order in which dynamo traced them."""
        return tuple(graph for ref in self._graphs if (graph := ref()) is not None)

    def joint_plan(self, model: str, names: Mapping[int, str]) -> Plan:
        """Return the joint plan of the graphs of the last complete step, or of all that are known so far.

        Args:
            model: The name of the model in the plan.
            names: The name of each parameter and buffer of the model, by its `id`.

        Returns:
            The plan, with a section for each graph.

        Example:
            ```python
            print(backend.joint_plan("Model", {id(p): name for name, p in model.named_parameters()}).report())
            ```
        """
        self.place()
        return joint_plan(model, (instance for graph in self.graphs for instance in graph.instances), names)

    def place(self) -> None:
        """Place the graphs of the last complete step in one arena, as the next call would.

        Example:
            ```python
            backend.place()
            print(backend.arena_size)  # bytes
            ```
        """
        self._coordinators.coordinator.place_last_step()

    def release(self) -> bool:
        """Free the arenas of its graphs, in all threads, until they run again.

        Returns:
            False if a call waits for its backward, or another thread runs one; then nothing is freed.

        Example:
            ```python
            backend.release()
            print(backend.arena_size)  # 0
            ```
        """
        return release_arenas(instance for graph in self.graphs for instance in graph.instances)

    @property
    def arena_size(self) -> int:
        """The bytes of all arenas that its graphs have now."""
        arenas = (instance.arena for graph in self.graphs for instance in graph.instances)
        return sum({id(arena.memories): arena.held for arena in arenas}.values())


def _remade(kind: type[Backend], options: dict[str, Any]) -> Backend:
    return kind(**options)


@functools.cache
def _default() -> Backend:
    return Backend()


def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
    """Return the callable that replaces a graph: the entry point of `backend="memplan"`, with default options."""
    return _default()(graph, inputs)


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
            options.require_room(plan, self.backend.arena_size)


def can_be_several(refused: UnsupportedGraph, options: RunOptions) -> bool:
    """Return whether several graphs, or eager, can hold what one graph cannot, and all options hold then too."""
    if not (breaks(refused) or (runs_as_eager(refused) and not options.has_budget)):
        return False
    plain = {f.name: f.default for f in fields(CompileOptions) if f.name in (*_OF_ONE_GRAPH[1:], "cuda_graph")}
    held = all(getattr(options, name) == default for name, default in plain.items())
    return held and not options.measures
