"""The trial run: runs the step once, op by op, on the example inputs, before code is generated.

It chooses and verifies the callable of each op, and measures what the kernels allocate by themselves. It changes no
tensor of the user: ops that write to parameters, buffers or inputs are not run, and the state of random
generators is restored.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from memplan.core.collectives import is_collective
from memplan.core.graph import Graph, Op, StorageKind, Value
from memplan.core.plan import Plan
from memplan.devices.generators import forked
from memplan.devices.kinds import give_back_unused
from memplan.devices.measure import can_measure, peak_bytes
from memplan.distributed.ops import bytes_beside
from memplan.errors import UnsupportedGraph
from memplan.runtime.codegen.step_ir import Layout, refs
from memplan.runtime.kernels.kernel_selection import BoundOp, CallForm, KernelSelector, generated_op, materialise
from memplan.runtime.kernels.stand_ins import select_on_stand_ins
from memplan.runtime.memory.arena import dtype_of, offset_within, view_of
from memplan.trace.passes.nodes import ALLOCATE
from memplan.trace.traced import GeneratedCall, KernelCall, Source, TracedGraph


def without_autocast(device: torch.device) -> torch.autocast:
    """Return a context that disables autocast: casts are part of the trace, and must not happen twice."""
    return torch.autocast(device.type, enabled=False)


def run_trial(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    static: Mapping[int, torch.Tensor],
    tensors: Mapping[int, torch.Tensor],
    *,
    transfers: Mapping[int, BoundOp],
) -> tuple[Plan, tuple[BoundOp, ...]]:
    """Return the plan with measured kernels and temporaries, and the bound ops (indexed like those of the graph).

    `transfers` and saved generator states are bound already; in the trial run, transfers copy immediately. The arena is
    not needed yet: kernels are chosen on stand-ins where that is possible, and each result has memory of its own.
    """
    env = [*(static.get(index) for index in range(len(traced.graph.values))), *[None] * traced.opaque_count]
    fill_inputs(env, traced, tensors)
    copied = _copy_changed(env, traced)
    memory = TrialMemory(env, traced.graph, layout, plan.schedule.order)
    with torch.no_grad(), forked(traced.device), without_autocast(traced.device):
        known = {index: t for index, t in enumerate(env[: len(traced.graph.values)]) if t is not None}
        selector = select_on_stand_ins(traced, plan.schedule.order, known)
        bound = _select_kernels(
            traced, plan, layout, env, memory=memory, selector=selector, transfers=transfers, copied=copied
        )
        give_back_unused(traced.device)
        temporaries = None
        if can_measure(traced.device):
            temporaries = _measure(traced, plan, layout, bound, env, memory=memory, copied=copied)
            give_back_unused(traced.device)  # the arena is not made of what was freed here
    ops = zip(plan.graph.ops, bound, strict=True)
    measured = tuple(replace(op, direct=b.form is not CallForm.FUNCTIONAL) for op, b in ops)
    return replace(plan, graph=replace(plan.graph, ops=measured), temporaries=temporaries), bound


def _select_kernels(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    env: list[torch.Tensor | None],
    *,
    memory: TrialMemory,
    selector: KernelSelector,
    transfers: Mapping[int, BoundOp],
    copied: frozenset[int],
) -> tuple[BoundOp, ...]:
    bound = dict(transfers)
    for kernel in traced.kernels:
        if isinstance(kernel, GeneratedCall):
            kernel.kernel.start()  # all of them, beside each other
    for index in plan.schedule.order:
        kernel = traced.kernels[index]
        if isinstance(kernel, KernelCall):
            memory.before_call(refs((kernel.args, kernel.kwargs)))
            bound[index] = selector.select(kernel, env)
        elif isinstance(kernel, GeneratedCall):  # it is compiled for these very tensors: there is no choice
            memory.before_call(refs((kernel.args, kernel.kwargs)))
            bound[index] = generated_op(kernel)
        memory.before(index, bound[index])
        if leaves_users_alone(traced, layout, index, copied):
            run_bound(bound[index], env, memory.adopt)
        elif is_collective(traced.graph.ops[index].target):
            _fill_with_zeros(bound[index], env)
        memory.after(index)
    memory.clear()
    return tuple(bound[index] for index in range(len(bound)))


def _measure(
    traced: TracedGraph,
    plan: Plan,
    layout: Layout,
    bound: Sequence[BoundOp],
    env: list[torch.Tensor | None],
    *,
    memory: TrialMemory,
    copied: frozenset[int],
) -> tuple[int, ...]:
    """Return for each op the most bytes outside the arena while it runs, without those that the caller will own."""
    graph = traced.graph
    tried = {i for i in plan.schedule.order if leaves_users_alone(traced, layout, i, copied)}
    thunks: list[Callable[[], None]] = []
    for i in plan.schedule.order:
        run: Callable[[], None] = partial(run_bound, bound[i], env, memory.adopt) if i in tried else _nothing
        if is_collective(graph.ops[i].target):
            run = partial(_fill_with_zeros, bound[i], env)
        thunks += [partial(memory.before, i, bound[i]), run, partial(memory.after, i)]
    peaks = peak_bytes(thunks, traced.device)[1::3]
    memory.clear()
    found, seen = [0] * len(graph.ops), set[int]()
    for index, peak in zip(plan.schedule.order, peaks, strict=True):
        adopted, op = 0, graph.ops[index]
        if bound[index].form is CallForm.FUNCTIONAL:  # what it writes to later is copied there
            new = layout.fresh_storages.intersection(graph.written(op)) - seen
            adopted = sum(graph.storages[s].nbytes for s in new)
        seen.update(graph.touched(op))
        found[index] = _bytes_of_collective(graph, op) if is_collective(op.target) else max(peak - adopted, 0)
    return tuple(found)


def _bytes_of_collective(graph: Graph, op: Op) -> int:
    """Return the bytes that a collective, which is not run, takes beside those that it reads and writes."""
    read, written = (sum(_nbytes(graph.values[v]) for v in values) for values in (op.reads, op.writes))
    return bytes_beside(op.target, op.group, read=read, written=written) if op.group else 0


def _nbytes(value: Value) -> int:
    return math.prod(value.shape) * dtype_of(value).itemsize


def _nothing() -> None:
    """Does nothing: it stands for an op that cannot be tried."""


def _fill_with_zeros(bound: BoundOp, env: list[torch.Tensor | None]) -> None:
    """Fill the results of a collective, which is not run, so that what reads them is tried on numbers."""
    for out in bound.outs:
        result = None if out is None else env[out]
        if result is not None:
            result.zero_()


def _copy_changed(env: list[torch.Tensor | None], traced: TracedGraph) -> frozenset[int]:
    """Put copies in `env` for the user's tensors that generated kernels change, and return their storages.

    Such a kernel has other results too, which the kernels after it take as indices: it is not left out of the trial.
    """
    graph = traced.graph
    made = {i for i, s in enumerate(graph.storages) if s.planned}
    pairs = zip(graph.ops, traced.kernels, strict=True)
    changed = {s for op, k in pairs if isinstance(k, GeneratedCall) for s in graph.written(op)} - made
    copies: dict[int, torch.UntypedStorage] = {}
    for index, value in enumerate(graph.values):
        tensor = env[index]
        if value.storage in changed and tensor is not None:
            if value.storage not in copies:
                copies[value.storage] = tensor.untyped_storage().clone()  # type: ignore[no-untyped-call]
            env[index] = view_of(copies[value.storage], value, int(tensor.storage_offset()))
    return frozenset(copies)


def leaves_users_alone(traced: TracedGraph, layout: Layout, index: int, copied: frozenset[int] = frozenset()) -> bool:
    """Return whether an op can be tried: it changes no tensor of the user, is not a check that only raises, and
    needs no other rank.

    `copied`: the storages that stand for the user's in the trial.
    """
    graph = traced.graph
    op = graph.ops[index]
    if (op.only_raises and op.target != str(ALLOCATE)) or is_collective(op.target):
        return False
    written = graph.written(op)
    ours = {s for s in written if graph.storages[s].planned or graph.storages[s].kind is StorageKind.HOST}
    return all(s in ours or s in copied or s in layout.fresh_storages for s in written)


def fill_inputs(env: list[torch.Tensor | None], traced: TracedGraph, tensors: Mapping[int, torch.Tensor]) -> None:
    """Fill `env` with stand-ins for what the caller passes: the example inputs, and ones for tangents."""
    graph = traced.graph
    owner: dict[int, torch.UntypedStorage] = {}
    base: dict[int, tuple[Value, int]] = {}
    for i, b in enumerate(traced.bindings):
        value = graph.values[b.value]
        if b.source is Source.INPUT:
            owner[value.storage] = tensors[i].untyped_storage()
            base[value.storage] = value, int(tensors[i].storage_offset())
        elif b.source is Source.TANGENT:
            device = torch.device(graph.storages[value.storage].device)
            ones = torch.empty_strided(value.shape, value.strides, dtype=dtype_of(value), device=device)
            owner[value.storage] = ones.fill_(1).untyped_storage()
    for index, value in enumerate(graph.values):
        if env[index] is None and value.storage in owner:
            within = base.get(value.storage)
            offset = None if within is None else offset_within(within[0], value, within[1])
            env[index] = view_of(owner[value.storage], value, offset)


class TrialMemory:
    """Memory for the results of ops, in `env`, each on its own from the first op that touches it to the last.

    So a trial needs what is alive at once, and no arena. What the caller keeps stays until `clear`.
    """

    def __init__(self, env: list[torch.Tensor | None], graph: Graph, layout: Layout, order: Sequence[int]) -> None:
        self._env, self._graph = env, graph
        planned = {i for i, s in enumerate(graph.storages) if s.planned}
        self._values = defaultdict[int, list[int]](list)
        for index, value in enumerate(graph.values):
            if value.storage in planned or value.storage in layout.fresh_storages:
                self._values[value.storage].append(index)
        self._touched = {op: self._values.keys() & set(graph.touched(graph.ops[op])) for op in order}
        last = {storage: op for op in order for storage in self._touched[op]}
        freed = planned | layout.released
        self._ends = {op: {s for s in self._touched[op] & freed if last[s] == op} for op in order}

    def before_call(self, values: Iterable[int]) -> None:
        """Allocate what a call takes although nothing wrote it, such as what `torch.empty` returns."""
        for value in values:
            storage = self._graph.values[value].storage
            if storage in self._values and self._env[value] is None:
                self._allocate(storage)

    def before(self, op: int, bound: BoundOp | None = None) -> None:
        """Allocate what `op` is the first to touch, but for what `bound` returns in new memory."""
        new = bound.outs if bound is not None and bound.form is CallForm.FUNCTIONAL else ()
        returned = {self._graph.values[out].storage for out in new if out is not None}
        for storage in self._touched[op] - returned:
            if self._env[self._values[storage][0]] is None:
                self._allocate(storage)

    def adopt(self, value: int, result: torch.Tensor) -> None:
        """Use a new result as a value if it has the value's layout; otherwise copy it to memory that has."""
        v = self._graph.values[value]
        _require_shape(v.name, result, v.shape)
        nbytes = self._graph.storages[v.storage].nbytes
        whole = result.storage_offset() == v.offset and result.untyped_storage().nbytes() == nbytes
        if whole and result.stride() == v.strides:
            self._hold(v.storage, result.untyped_storage())
            return
        self._allocate(v.storage)
        destination = self._env[value]
        assert destination is not None
        destination.copy_(result)

    def after(self, op: int) -> None:
        """Free what `op` is the last to touch, and nobody keeps."""
        self._free(self._ends[op])

    def clear(self) -> None:
        """Free all."""
        self._free(self._values)

    def _allocate(self, storage: int) -> None:
        s = self._graph.storages[storage]
        self._hold(storage, torch.empty(s.nbytes, dtype=torch.uint8, device=s.device).untyped_storage())

    def _hold(self, storage: int, memory: torch.UntypedStorage) -> None:
        for index in self._values[storage]:
            self._env[index] = view_of(memory, self._graph.values[index])

    def _free(self, storages: Iterable[int]) -> None:
        for storage in storages:
            for index in self._values[storage]:
                self._env[index] = None


def run_bound(
    bound: BoundOp, env: list[torch.Tensor | None], adopt: Callable[[int, torch.Tensor], None] | None = None
) -> None:
    """Run one op on real tensors, outside generated code. `adopt(value, result)` takes new results without a place."""
    args, kwargs = materialise((bound.args, bound.kwargs), env)
    if bound.form is CallForm.START:
        destination, source = args
        destination.copy_(source)
        return
    if bound.form is CallForm.WAIT:
        return
    results = bound.function(*args, **kwargs)
    for position, number in bound.opaque_results:
        env[-1 - number] = results[position]
    if bound.form is CallForm.FUNCTIONAL:
        for out, result in zip(bound.outs, results if bound.returns_sequence else (results,), strict=True):
            if out is not None:
                destination = env[out]
                if destination is None:
                    assert adopt is not None
                    adopt(out, result)
                    continue
                _require_shape(str(bound.function), result, destination.shape)
                destination.copy_(result)


def _require_shape(name: str, result: torch.Tensor, traced: Sequence[int]) -> None:
    """Raise `UnsupportedGraph` for a result of another shape than its trace, which a copy might broadcast."""
    if tuple(result.shape) != tuple(traced):
        reason = f"its result is {tuple(result.shape)}, and was traced as {tuple(traced)}"
        hint = "call the model once before compiling it, if it takes sizes from its first call"
        raise UnsupportedGraph(name, reason, hint, see="other-result")
