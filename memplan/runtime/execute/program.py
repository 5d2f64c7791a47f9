"""Builds a program: one traced step, ready to run at the addresses of its plan, as two generated functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.happens_before import require_no_races
from memplan.core.legal_orders import require_written_first
from memplan.core.plan import Plan
from memplan.devices.kinds import is_accelerator
from memplan.runtime.codegen.codegen import LEFT, FunctionWriter
from memplan.runtime.codegen.step_ir import Layout, Namespace
from memplan.runtime.copies.copies import Copy
from memplan.runtime.debug.hooks import Hook, observing
from memplan.runtime.debug.sanitizers import NO_SANITIZERS, Callback, Sanitizers
from memplan.runtime.execute.trial import run_trial
from memplan.runtime.kernels.fused_updates import fuse_updates
from memplan.runtime.kernels.kernel_selection import BoundOp
from memplan.runtime.kernels.transfers import bind_transfers
from memplan.runtime.memory.arena import Arena, Memory, view_of, view_within
from memplan.trace.traced import Binding, Source, TracedGraph

Functions = tuple[Callable[..., Any], Callable[..., Any] | None]
_STATIC_SOURCES = (Source.PARAMETER, Source.BUFFER, Source.STATE, Source.CONSTANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Two functions: `forward(*inputs) -> (fresh, saved)` and `backward(*saved, *tangents) -> (gradients,)`.

    `fresh` are results that the caller will own. `inputs` are the bindings (indices) that `forward` takes. `saved` are
    the values outside the arena that are saved for the backward: inputs, and outputs (`saved_outputs` says which).
    `left` are activations outside the arena that the forward leaves to the backward, which frees them: no one else
    refers to them.
    `used_in_backward` are the bindings whose bytes gradients depend on. `host` holds offloaded bytes. `last` is called
    at the end of forward and backward.
    """

    traced: TracedGraph
    plan: Plan
    arena: Arena
    host: Memory
    copies: tuple[Copy, ...]
    sanitizers: Sanitizers
    bound: tuple[BoundOp, ...]
    layout: Layout
    namespace: Namespace
    forward: Callable[..., Any]
    backward: Callable[..., Any] | None
    inputs: tuple[int, ...]
    saved: tuple[int, ...]
    left: tuple[int, ...]
    saved_outputs: tuple[bool, ...]
    used_in_backward: frozenset[int]
    last: Callback | None

    def observed(self, emit: Hook | None, op_timer: Sanitizers = NO_SANITIZERS) -> Functions:
        """Return forward and backward over the same addresses that call `emit` with every event.

        `op_timer`: the functions to call right before and after each op.
        """
        sanitizers = self.sanitizers.around(op_timer, len(self.plan.schedule.order))
        return _functions(
            self.traced,
            self.layout,
            self.namespace,
            bound=self.bound,
            order=self.plan.schedule.order,
            saved=self.saved,
            left=self.left,
            sanitizers=sanitizers if emit is None else observing(sanitizers, self.plan, emit),
            last=self.last,
            prefix="observed_",
            join=False,  # each op is an event of its own
        )

    def backward_into(self, values: Sequence[int], bound: Sequence[BoundOp]) -> Callable[..., Any]:
        """Return a backward that takes the tensors of `values`, which it would allocate otherwise, as its last
        arguments. `bound`: the ops to run instead of those of the program.
        """
        made = _functions(
            self.traced,
            self.layout,
            self.namespace,
            bound=bound,
            order=self.plan.schedule.order,
            saved=self.saved,
            left=self.left,
            sanitizers=self.sanitizers,
            last=self.last,
            prefix="into_",
            given=values,
        )[1]
        assert made is not None
        return made

    @property
    def left_outside(self) -> list[torch.Tensor]:
        """The activations outside the arena between a forward and its backward; empty where there is no such step."""
        found: list[torch.Tensor] = self.namespace.names.get(LEFT, [])
        return found

    @property
    def stalled(self) -> float:
        """Seconds that all steps so far have waited for copies."""
        return sum(copy.stalled for copy in self.copies)

    @property
    def may_move(self) -> bool:
        """Whether `move` moves all that knows addresses: an arena on several devices has several."""
        return not self.arena.sections

    def move(self) -> None:
        """Use the arena at the address where it is from now on."""
        graph = self.traced.graph
        planned = _in_arena(graph, self.plan, self.arena)
        for index in self.layout.static:
            value = graph.values[index]
            if (storage := planned.get(value.storage)) is not None:  # in place: generated code refers to the tensor
                self.namespace.names[f"v{index}"].set_(storage, value.offset, value.shape, value.strides)

    def rebind(self, binding: int, tensor: torch.Tensor) -> None:
        """Use another tensor for a parameter or buffer from now on."""
        graph, b = self.traced.graph, self.traced.bindings[binding]
        for index, value in enumerate(graph.values):
            if value.storage == graph.values[b.value].storage:
                self.namespace.move(index, _over(tensor, self.traced, b, index))


def build_program(
    traced: TracedGraph,
    plan: Plan,
    arena: Arena,
    host: Memory,
    tensors: Mapping[int, torch.Tensor],
    *,
    sanitizers: Sanitizers,
    bound: tuple[BoundOp, ...] | None = None,
) -> Program:
    """Bind, measure and compile a step. `tensors` maps bindings (indices) to parameters, buffers, example inputs.

    The plan of the program is `plan` with the results of the trial run. `bound`: the bound ops of an earlier trial run
    of the same program, which is then not run again. Raises `InvalidPlan` if a copy races with an op, or an
    op reads what nothing has written.
    """
    require_written_first(plan.graph, plan.schedule.order)
    require_no_races(plan)
    layout = _layout(traced)
    graph, order = traced.graph, plan.schedule.order
    kept = _on_host(graph, plan, host)
    transfers, copies = bind_transfers(graph, traced.kernels, order, arena, host.memory)
    if bound is None:
        given = _static_tensors(traced, kept, tensors, layout)
        plan, bound = run_trial(traced, plan, layout, given, tensors, transfers=transfers)
    bound = tuple(transfers.get(i, b) for i, b in enumerate(bound))  # each program has copies of its own
    static = _static_tensors(traced, {**_in_arena(graph, plan, arena), **kept}, tensors, layout)  # allocates the arena
    namespace = Namespace({f"v{index}": tensor for index, tensor in static.items()})
    split = sum(graph.ops[i].phase is Phase.FORWARD for i in order)
    inputs = tuple(i for i, b in enumerate(traced.bindings) if b.source is Source.INPUT)
    dynamic_bases = {b.value for b in traced.bindings if b.source is Source.INPUT} | set(traced.results.fresh)
    touched_late = {layout.base_of.get(s, -1) for i in order[split:] for s in graph.touched(graph.ops[i])}
    gradient_bases = {layout.base_of.get(graph.values[v].storage, -1) for v in graph.gradients}
    fresh_bases = {layout.base_of[graph.values[v].storage] for v in traced.results.fresh}
    saved = tuple(sorted((touched_late | gradient_bases) & (dynamic_bases | fresh_bases)))
    early = {s for i in order[:split] for s in graph.touched(graph.ops[i])}
    left = tuple(sorted(touched_late & {layout.base_of[s] for s in early & layout.released}))
    last = arena.copies.settle if traced.runs_on else None  # results must have arrived before the caller gets them
    forward, backward = _functions(
        traced, layout, namespace, bound=bound, order=order, saved=saved, left=left, sanitizers=sanitizers, last=last
    )
    return Program(
        traced=traced,
        plan=plan,
        arena=arena,
        host=host,
        copies=copies,
        sanitizers=sanitizers,
        bound=bound,
        layout=layout,
        namespace=namespace,
        forward=forward,
        backward=backward,
        inputs=inputs,
        saved=saved,
        left=left,
        saved_outputs=tuple(graph.values[v].storage in layout.fresh_storages for v in saved),
        used_in_backward=_read_late(traced, order[split:]),
        last=last,
    )


def _functions(
    traced: TracedGraph,
    layout: Layout,
    namespace: Namespace,
    *,
    bound: Sequence[BoundOp],
    order: Sequence[int],
    saved: Sequence[int],
    left: Sequence[int],
    sanitizers: Sanitizers,
    last: Callback | None,
    prefix: str = "",
    join: bool = True,
    given: Sequence[int] = (),
) -> Functions:
    """Return the generated forward, and backward if the step has one. `join`: fuse consecutive updates; `given`: the
    values whose memory the backward takes as its last arguments.
    """
    graph = traced.graph
    split = sum(graph.ops[i].phase is Phase.FORWARD for i in order)
    fused = fuse_updates(traced, bound, order) if join else {}
    steps = [(step, fused.get(step, bound[op])) for step, op in enumerate(order)]
    forward = FunctionWriter(f"{prefix}forward", layout, namespace, [b.value for b in traced.bound(Source.INPUT)])
    _write(forward, steps[:split], sanitizers, last)
    backward = None
    if traced.training:
        tangents = [b.value for b in traced.bound(Source.TANGENT)]
        writer = FunctionWriter(f"{prefix}backward", layout, namespace, [*saved, *tangents, *given], left)
        _write(writer, steps[split:], sanitizers, last)
        backward = writer.finish([graph.gradients])
    return forward.finish([traced.results.fresh, saved], left=left), backward


def _layout(traced: TracedGraph) -> Layout:
    """Return the layout: values in the arena, its host memory, parameters, buffers and constants are static.

    Every other storage has a base value.
    """
    graph = traced.graph
    ours = {i for i, s in enumerate(graph.storages) if s.planned or s.kind is StorageKind.HOST}
    static_storages = ours | {graph.values[b.value].storage for b in traced.bindings if b.source in _STATIC_SOURCES}
    base_of: dict[int, int] = {}
    for index, value in enumerate(graph.values):
        if value.storage not in static_storages:
            base_of.setdefault(value.storage, index)  # the first value of a storage spans it
    bound_storages = {graph.values[b.value].storage for b in traced.bindings}
    return Layout(
        graph=graph,
        static=frozenset(i for i, v in enumerate(graph.values) if v.storage in static_storages),
        base_of=base_of,
        fresh_storages=frozenset(base_of) - bound_storages,
        released=graph.released,
        autocast=traced.autocast is not None,
        pinned=bool(traced.runs_on) and is_accelerator(traced.device),
    )


def _in_arena(graph: Graph, plan: Plan, arena: Arena) -> dict[int, torch.UntypedStorage]:
    """Return the planned storages (by index) at their offsets."""
    offsets = plan.solution.offsets
    return {
        index: arena.storage(offsets[s.name] + plan.redzone if s.nbytes else 0, s.nbytes)
        for index, s in enumerate(graph.storages)
        if s.planned and (s.name in offsets or not s.nbytes)  # no op touches the others
    }


def _on_host(graph: Graph, plan: Plan, host: Memory) -> dict[int, torch.UntypedStorage]:
    """Return the host storages (by index) at their offsets."""
    offsets = plan.eviction.host.offsets if plan.eviction else {}
    return {
        index: host.storage(offsets[s.name] if s.nbytes else 0, s.nbytes)
        for index, s in enumerate(graph.storages)
        if s.kind is StorageKind.HOST and (s.name in offsets or not s.nbytes)
    }


def _static_tensors(
    traced: TracedGraph,
    planned: Mapping[int, torch.UntypedStorage],
    tensors: Mapping[int, torch.Tensor],
    layout: Layout,
) -> dict[int, torch.Tensor]:
    """Return every static value as a tensor. `planned`: the storages in the arena and on the host, by index."""
    graph = traced.graph
    binding_of = {graph.values[b.value].storage: i for i, b in reversed(list(enumerate(traced.bindings)))}
    made: dict[int, torch.Tensor] = {}
    for index in layout.static:
        storage = graph.values[index].storage
        if storage in planned:
            made[index] = view_of(planned[storage], graph.values[index])
        elif storage in binding_of:
            i = binding_of[storage]
            made[index] = _over(tensors[i], traced, traced.bindings[i], index)
    return made


def _over(tensor: torch.Tensor, traced: TracedGraph, binding: Binding, index: int) -> torch.Tensor:
    """Return value `index` as a view of a bound tensor, wherever that tensor starts in its storage."""
    return view_within(traced.graph.values[binding.value], traced.graph.values[index], tensor)


def _write(
    writer: FunctionWriter,
    steps: Iterable[tuple[int, BoundOp | None]],
    sanitizers: Sanitizers,
    last: Callback | None,
) -> None:
    for step, bound in steps:
        for callback in sanitizers.before(step):
            writer.callback(callback)
        if bound is not None:
            writer.op(bound)
        for callback in sanitizers.after(step):
            writer.callback(callback)
    if last is not None:
        writer.callback(last)


def _read_late(traced: TracedGraph, late: Sequence[int]) -> frozenset[int]:
    """Return the bindings whose bytes gradients depend on, which must not change after the forward.

    What the backward reads only to write it, such as a counter, may: eager reads it as it is by then.
    """
    graph = traced.graph
    needed = {graph.values[v].storage for v in graph.gradients}
    for op in (graph.ops[i] for i in reversed(late)):
        if not needed.isdisjoint(graph.written(op)) or op.only_raises:
            needed.update(graph.values[v].storage for v in op.reads)
    return frozenset(i for i, b in enumerate(traced.bindings) if graph.values[b.value].storage in needed)
