"""Builds a program: one traced step, ready to run at the addresses of its plan, as two generated functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from memplan.core.collectives import WAIT
from memplan.core.evictions import OFFLOAD, RELOAD, SEND
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.happens_before import require_no_races
from memplan.core.legal_orders import require_written_first
from memplan.core.plan import Plan
from memplan.devices.kinds import is_accelerator
from memplan.distributed.ops import StartedCollective
from memplan.errors import InvalidEviction
from memplan.runtime.codegen import LEFT, FunctionWriter, Layout, Namespace
from memplan.runtime.copies import Copy, Direction
from memplan.runtime.debug.hooks import Hook, observing
from memplan.runtime.debug.sanitizers import NO_SANITIZERS, Callback, Sanitizers
from memplan.runtime.execute.trial import run_trial
from memplan.runtime.kernels import BoundOp, CallForm, save_state
from memplan.runtime.memory.arena import Arena, Memory, view_of, view_within
from memplan.trace.optimizer.updates import kind_of
from memplan.trace.traced import Binding, Kernel, KernelCall, Ref, SaveState, Source, TracedGraph, Transfer

Functions = tuple[Callable[..., Any], Callable[..., Any] | None]
_STATIC_SOURCES = (Source.PARAMETER, Source.BUFFER, Source.STATE, Source.CONSTANT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Two functions: `forward(*inputs) -> (fresh, saved)` and `backward(*saved, *tangents) -> (gradients,)`.

    `fresh` are results that the caller will own. `inputs` are the bindings (indices) that `forward` takes. `saved` are
    the values outside the arena that are saved for the backward: inputs, and outputs (`saved_outputs` says which).
    `left` are activations outside the arena that the forward leaves to the backward, which frees them: no one else
    refers to them.
    `used_in_backward` are the bindings whose bytes gradients depend on. `host` holds offloaded bytes. `begin_update` is
    called before the backward first changes a parameter or the optimizer's state, `last` at the end of forward and
    backward.
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
    begin_update: Callback | None
    last: Callback | None

    def observed(self, emit: Hook | None, op_timer: Sanitizers = NO_SANITIZERS) -> Functions:
        """Return forward and backward over the same addresses that call `emit` with every event.

        `op_timer`: the functions to call right before and after each op.
        """
        sanitizers = self.sanitizers.around(op_timer, len(self.plan.schedule.order))
        sanitizers = sanitizers if emit is None else observing(sanitizers, self.plan, emit)
        return self.written(self.bound, sanitizers, prefix="observed_", join=False)  # each op is an event of its own

    def backward_into(self, values: Sequence[int], bound: Sequence[BoundOp]) -> Callable[..., Any]:
        """Return a backward that takes the tensors of `values`, which it would allocate otherwise, as its last
        arguments. `bound`: the ops to run instead of those of the program.
        """
        made = self.written(bound, self.sanitizers, prefix="into_", given=values)[1]
        assert made is not None
        return made

    def written(
        self,
        bound: Sequence[BoundOp],
        sanitizers: Sanitizers,
        *,
        prefix: str = "",
        join: bool = True,
        given: Sequence[int] = (),
    ) -> Functions:
        """Return the generated forward, and backward if the step has one. `join`: fuse consecutive updates; `given`:
        the values whose memory the backward takes as its last arguments.
        """
        traced, order, layout, namespace = self.traced, self.plan.schedule.order, self.layout, self.namespace
        graph = traced.graph
        split = sum(graph.ops[i].phase is Phase.FORWARD for i in order)
        fused = fuse_updates(traced, bound, order) if join else {}
        steps = [(step, fused.get(step, bound[op])) for step, op in enumerate(order)]
        forward = FunctionWriter(f"{prefix}forward", layout, namespace, [b.value for b in traced.bound(Source.INPUT)])
        _write(forward, steps[:split], sanitizers, self.last)
        backward = None
        if traced.training:
            tangents = [b.value for b in traced.bound(Source.TANGENT)]
            taken = [*self.saved, *tangents, *given]
            writer = FunctionWriter(f"{prefix}backward", layout, namespace, taken, self.left)
            first = split + self._first_update(order[split:]), self.begin_update
            _write(writer, steps[split:], sanitizers, self.last, first)
            backward = writer.finish([graph.gradients])
        return forward.finish([traced.results.fresh, self.saved], left=self.left), backward

    def _first_update(self, late: Sequence[int]) -> int:
        """Return which of the ops of the backward is the first to change a parameter or the optimizer's state."""
        graph, updated = self.traced.graph, (Source.PARAMETER, Source.STATE)
        kept = {graph.values[b.value].storage for b in self.traced.bindings if b.source in updated and b.written}
        return next((i for i, op in enumerate(late) if not kept.isdisjoint(graph.written(graph.ops[op]))), len(late))

    @property
    def left_outside(self) -> list[torch.Tensor]:
        """The activations outside the arena between a forward and its backward; empty where there is no such step."""
        found: list[torch.Tensor] = self.namespace.names.get(LEFT, [])
        return found

    @property
    def stalled(self) -> float:
        """Seconds that all steps so far have waited for copies."""
        return sum(copy.stalled for copy in self.copies)

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
    begin_update: Callback | None = None,
    bound: tuple[BoundOp, ...] | None = None,
) -> Program:
    """Bind, measure and compile a step. `tensors` maps bindings (indices) to parameters, buffers, example inputs.

    The plan of the program is `plan` with the results of the trial run. `bound`: the bound ops of an earlier trial run
    of the same program, which is then not run again. Raises `InvalidPlan` if a copy races with an op, or an
    op reads what nothing has written.
    """
    require_written_first(plan.graph, plan.schedule.order)
    require_no_races(plan)
    layout = _layout(traced, arena)
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
    made = Program(
        traced=traced,
        plan=plan,
        arena=arena,
        host=host,
        copies=copies,
        sanitizers=sanitizers,
        bound=bound,
        layout=layout,
        namespace=namespace,
        forward=_unwritten,
        backward=None,
        inputs=inputs,
        saved=saved,
        left=left,
        saved_outputs=tuple(graph.values[v].storage in layout.fresh_storages for v in saved),
        used_in_backward=_read_late(traced, order[split:]),
        begin_update=begin_update,
        last=last,
    )
    forward, backward = made.written(bound, sanitizers)
    return replace(made, forward=forward, backward=backward)


def _unwritten(*_: object) -> None:
    """Does nothing: it stands for a forward until that is written."""


def _layout(traced: TracedGraph, arena: Arena) -> Layout:
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
        locked=arena.results.empty if traced.runs_on and is_accelerator(traced.device) else None,
    )


def _in_arena(graph: Graph, plan: Plan, arena: Arena) -> dict[int, torch.UntypedStorage]:
    """Return the planned storages (by index) at their offsets."""
    offsets = plan.solution.offsets
    return {
        index: arena.storage(plan, offsets[s.name] + plan.redzone if s.nbytes else 0, s.nbytes)
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
    first_update: tuple[int, Callback | None] = (-1, None),
) -> None:
    for step, bound in steps:
        for callback in sanitizers.before(step):
            writer.callback(callback)
        if step == first_update[0] and first_update[1] is not None:
            writer.callback(first_update[1])
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


def fuse_updates(traced: TracedGraph, bound: Sequence[BoundOp], order: Sequence[int]) -> Mapping[int, BoundOp | None]:
    """Return what to call at steps of consecutive updates of one kind: all updates at the first, None at the others.

    No other op runs in between, so that every gradient exists and is alive at the first of them.
    """
    found: dict[int, BoundOp | None] = {}
    kinds = [kind_of(k, traced.graph) if isinstance(k, KernelCall) else None for k in traced.kernels]
    start = 0
    while start < len(order):
        end = start + 1
        while end < len(order) and kinds[order[end]] == kinds[order[start]]:
            end += 1
        if end > start + 1 and kinds[order[start]] is not None and bound[order[start]].form is CallForm.IN_PLACE:
            found |= dict.fromkeys(range(start, end))
            found[start] = _fuse([bound[op] for op in order[start:end]])
        start = end
    return found


def _fuse(updates: Sequence[BoundOp]) -> BoundOp:
    """Return one call with the lists of all updates."""
    lists = zip(*(bound.args for bound in updates), strict=True)
    return replace(updates[0], args=tuple([item for one in of for item in one] for of in lists))


_DIRECTIONS = {OFFLOAD: Direction.TO_HOST, RELOAD: Direction.TO_DEVICE, SEND: Direction.ACROSS}


def bind_transfers(
    graph: Graph,
    kernels: Sequence[Kernel],
    order: Sequence[int],
    arena: Arena,
    host: torch.Tensor,
) -> tuple[dict[int, BoundOp], tuple[Copy, ...]]:
    """Return the bound op of each transfer, op of the host and saved generator state (by op index), and the copies as
    they start.

    `host` is the memory of offloaded bytes. Of a collective that is started and waited for, both ops are bound. Raises
    `InvalidEviction` for a wait without a start.
    """
    bound: dict[int, BoundOp] = {}
    started: list[Copy] = []
    in_flight: dict[tuple[int, int], Copy | StartedCollective] = {}
    for index in order:
        kernel = kernels[index]
        if isinstance(kernel, SaveState):
            bound[index] = _bound(CallForm.IN_PLACE, save_state, Ref(kernel.value))
        if isinstance(kernel, KernelCall) and graph.ops[index].starts:
            collective = arena.collectives.collective(kernel.target)
            (out,) = kernel.outs
            assert out is not None
            in_flight[_storages(graph, graph.ops[index].reads[0], out)] = collective
            bound[index] = BoundOp(
                form=CallForm.START, function=collective.start, args=kernel.args, kwargs={"out": Ref(out)}, outs=()
            )
        if isinstance(kernel, KernelCall) and graph.ops[index].on_host:
            start = arena.copies.host.starter(kernel.target._op)
            bound[index] = BoundOp(form=CallForm.START, function=start, args=kernel.args, kwargs=kernel.kwargs, outs=())
        if not isinstance(kernel, Transfer):
            continue
        source = kernel.reads[0]
        if kernel.target in _DIRECTIONS:
            (destination,) = kernel.writes
            copy = arena.copies.copy(_DIRECTIONS[kernel.target], host)
            in_flight[_storages(graph, source, destination)] = copy
            started.append(copy)
            bound[index] = _bound(CallForm.START, copy.start, Ref(destination), Ref(source))
        else:
            ended = in_flight.pop(_storages(graph, source, kernel.reads[1]), None)
            if ended is None:
                what = "collective" if kernel.target == WAIT else "copy"
                raise InvalidEviction(f"waits for a {what} that was not started", where=graph.ops[index].name)
            bound[index] = _bound(CallForm.WAIT, ended.wait)
    return bound, tuple(started)


def _storages(graph: Graph, source: int, destination: int) -> tuple[int, int]:
    return graph.values[source].storage, graph.values[destination].storage


def _bound(form: CallForm, function: Callable[..., None], *args: Ref) -> BoundOp:
    return BoundOp(form=form, function=function, args=args, kwargs={}, outs=())
