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
import torch.utils._pytree as pytree

from memplan.core.collectives import is_collective
from memplan.core.graph import Graph, Op, StorageKind, Value
from memplan.core.plan import Plan
from memplan.devices.kinds import forked, give_back_unused
from memplan.devices.measure import can_measure, peak_bytes
from memplan.distributed.ops import bytes_beside
from memplan.errors import UnsupportedGraph
from memplan.runtime.codegen import Layout, refs
from memplan.runtime.kernels import BoundOp, CallForm, KernelSelector, generated_op, materialise
from memplan.runtime.memory.arena import dtype_of, offset_within, view_of
from memplan.trace.passes.nodes import ALLOCATE
from memplan.trace.traced import GeneratedCall, KernelCall, OpaqueResult, Source, TracedGraph


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
    trial = Trial(traced, plan, layout, static, tensors)
    with torch.no_grad(), forked(traced.device), without_autocast(traced.device):
        bound = trial.select(transfers)
        give_back_unused(traced.device)
        temporaries = None
        if can_measure():
            temporaries = trial.measure(bound)
            give_back_unused(traced.device)  # the arena is not made of what was freed here
    ops = zip(plan.graph.ops, bound, strict=True)
    measured = tuple(replace(op, direct=b.form is not CallForm.FUNCTIONAL) for op, b in ops)
    return replace(plan, graph=replace(plan.graph, ops=measured), temporaries=temporaries), bound


class Trial:
    """One trial of a step: its tensors by value in `env`, in memory of their own."""

    def __init__(
        self,
        traced: TracedGraph,
        plan: Plan,
        layout: Layout,
        static: Mapping[int, torch.Tensor],
        tensors: Mapping[int, torch.Tensor],
    ) -> None:
        self.traced, self.order, self.layout = traced, plan.schedule.order, layout
        self.env = [*(static.get(index) for index in range(len(traced.graph.values))), *[None] * traced.opaque_count]
        fill_inputs(self.env, traced, tensors)
        copied = _copy_changed(self.env, traced)
        self.memory = TrialMemory(self.env, traced.graph, layout, self.order)
        self.tried = {i for i in self.order if leaves_users_alone(traced, layout, i, copied)}

    def select(self, transfers: Mapping[int, BoundOp]) -> tuple[BoundOp, ...]:
        """Return the callables of all ops, which run in order meanwhile."""
        traced, memory = self.traced, self.memory
        known = {index: t for index, t in enumerate(self.env[: len(traced.graph.values)]) if t is not None}
        selector = select_on_stand_ins(traced, self.order, known)
        bound = dict(transfers)
        for kernel in traced.kernels:
            if isinstance(kernel, GeneratedCall):
                kernel.kernel.start()  # all of them, beside each other
        for index in self.order:
            kernel = traced.kernels[index]
            if isinstance(kernel, KernelCall | GeneratedCall):
                memory.before_call(refs((kernel.args, kernel.kwargs)))
            if isinstance(kernel, KernelCall):
                bound[index] = selector.select(kernel, self.env)
            elif isinstance(kernel, GeneratedCall):  # it is compiled for these very tensors: there is no choice
                bound[index] = generated_op(kernel)
            memory.before(index, bound[index])
            self.run(index, bound[index])
            memory.after(index)
        memory.clear()
        return tuple(bound[index] for index in range(len(bound)))

    def measure(self, bound: Sequence[BoundOp]) -> tuple[int, ...]:
        """Return for each op the most bytes outside the arena while it runs, without those that the caller will own."""
        graph, memory = self.traced.graph, self.memory
        thunks: list[Callable[[], None]] = []
        for i in self.order:
            run = partial(self.run, i, bound[i])
            thunks += [partial(memory.before, i, bound[i]), run, partial(memory.after, i)]
        peaks = peak_bytes(thunks, self.traced.device)[1::3]
        memory.clear()
        found, seen = [0] * len(graph.ops), set[int]()
        for index, peak in zip(self.order, peaks, strict=True):
            adopted, op = 0, graph.ops[index]
            if bound[index].form is CallForm.FUNCTIONAL:  # what it writes to later is copied there
                new = self.layout.fresh_storages.intersection(graph.written(op)) - seen
                adopted = sum(graph.storages[s].nbytes for s in new)
            seen.update(graph.touched(op))
            found[index] = _bytes_of_collective(graph, op) if is_collective(op.target) else max(peak - adopted, 0)
        return tuple(found)

    def run(self, index: int, bound: BoundOp) -> None:
        """Run an op if it can be tried. What reads the results of a collective, which is not run, is tried on zeros."""
        if index in self.tried:
            run_bound(bound, self.env, self.memory.adopt)
        elif is_collective(self.traced.graph.ops[index].target):
            for out in bound.outs:
                result = None if out is None else self.env[out]
                if result is not None:
                    result.zero_()


def _bytes_of_collective(graph: Graph, op: Op) -> int:
    """Return the bytes that a collective, which is not run, takes beside those that it reads and writes."""
    read, written = (sum(_nbytes(graph.values[v]) for v in values) for values in (op.reads, op.writes))
    return bytes_beside(op.target, op.group, read=read, written=written) if op.group else 0


def _nbytes(value: Value) -> int:
    return math.prod(value.shape) * dtype_of(value).itemsize


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


_SEED = 0
_aten = torch.ops.aten
# Ops for which 0 is a valid index or class. Other kernels might read far away for lengths that do not fit each other.
_TAKES_INDICES = frozenset(
    (
        _aten.nll_loss_forward.default,
        _aten.nll_loss_backward.default,
        _aten.nll_loss2d_forward.default,
        _aten.nll_loss2d_backward.default,
        _aten.max_pool2d_with_indices_backward.default,
        _aten.embedding.default,
        _aten.embedding_dense_backward.default,
        _aten.gather.default,
        _aten.scatter_add.default,
        _aten.index_select.default,
    )
)


def select_on_stand_ins(
    traced: TracedGraph,
    order: Sequence[int],
    known: Mapping[int, torch.Tensor],
) -> KernelSelector:
    """Return a selector that knows the callables of the ops that can be tried on stand-ins.

    Parameters, buffers, constants and example inputs are themselves (`known`: values, by index). Other floating-point
    values are random numbers, masks are False, and indices are 0, one op's at a time. Ops that read other integers, or
    that refuse these, are left to be tried on real data.
    """
    selector = KernelSelector(traced.graph)
    generator = torch.Generator(device=traced.device).manual_seed(_SEED)
    tensors: list[torch.Tensor | None] = [None] * (len(traced.graph.values) + traced.opaque_count)
    for op in order:
        kernel = traced.kernels[op]
        if not isinstance(kernel, KernelCall) or not kernel.outs or _takes_opaque(kernel):
            continue
        values = [(v, traced.graph.values[v]) for v in traced.graph.ops[op].reads]
        if selector.knows(kernel) or not all(v in known or _can_stand_in(value, kernel) for v, value in values):
            continue
        for v, value in values:
            tensors[v] = known[v] if v in known else _stand_in(value, traced, generator)
        try:
            selector.select(kernel, tensors)
        except Exception:  # of any kind: the data are not the model's, and real data will be tried
            continue
        finally:
            for v, _ in values:
                tensors[v] = None
    return selector


def _takes_opaque(kernel: KernelCall) -> bool:
    return any(isinstance(leaf, OpaqueResult) for leaf in pytree.tree_leaves((kernel.args, kernel.kwargs)))


def _can_stand_in(value: Value, kernel: KernelCall) -> bool:
    dtype = dtype_of(value)
    integers = not dtype.is_floating_point and dtype != torch.bool
    return not dtype.is_complex and not (integers and kernel.target not in _TAKES_INDICES)


def _stand_in(value: Value, traced: TracedGraph, generator: torch.Generator) -> torch.Tensor:
    """Return random numbers, or zeros, in the layout of a value, which may overlap itself."""
    last = sum((n - 1) * stride for n, stride in zip(value.shape, value.strides, strict=True))
    device = torch.device(traced.graph.storages[value.storage].device)
    made = torch.zeros(max(last + 1, 0), dtype=dtype_of(value), device=device)
    if made.is_floating_point():
        made.uniform_(generator=generator)
    return made.as_strided(value.shape, value.strides)
