"""Finds the in-place candidates: results that may take the bytes of an input that has its last use at the op.

`memplan.core.in_place` chooses those that a given order allows.

In-place reuse is safe where the kernel reads each element before it writes the same place: pointwise kernels, and the
softmax family, which reads a whole row before it writes it. Products of complex numbers are left out: the compiler
vectorizes their kernels only where result and inputs do not overlap, so they round differently in place. An op without
a true `out=` kernel returns fresh memory first, so its result may be copied anywhere. A bitwise test covers each entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from memplan.core.collectives import ALL_REDUCE
from memplan.core.graph import Graph, Op, Value


def used_candidates(graph: Graph, order: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield pairs (op, the in-place candidate that it uses) in a legal `order`.

    Of the candidates whose input has its last use at the op, it is the one with the most bytes, the first of equals.
    Linear in the storages that the ops touch.
    """
    last = {storage: op for op in order for storage in graph.touched(graph.ops[op])}
    for index in order:
        found, most = None, 0
        for candidate in graph.ops[index].inplace_candidates:
            storage = graph.values[candidate[1]].storage
            if last[storage] == index and graph.storages[storage].nbytes > most:
                found, most = candidate, graph.storages[storage].nbytes
        if found is not None:
            yield index, found


def placed(graph: Graph, order: Sequence[int]) -> Graph:
    """Return the graph with in-place reuse applied under a legal `order`: a result that takes the bytes of an input
    becomes a value of that input's storage. Ops and their candidates are unchanged.
    """
    if not any(op.inplace_candidates for op in graph.ops):
        return graph
    donor: dict[int, int] = {}  # storage -> the first storage that had its bytes
    for _, (result, read) in used_candidates(graph, order):
        given = graph.values[read].storage
        donor[graph.values[result].storage] = donor.get(given, given)
    values = tuple(replace(v, storage=donor[v.storage]) if v.storage in donor else v for v in graph.values)
    return replace(graph, values=values)


_POINTWISE_NAMES = """
    abs.default add.Tensor sub.Tensor mul.Tensor div.Tensor neg.default exp.default log.default reciprocal.default
    sqrt.default rsqrt.default sin.default cos.default tanh.default sigmoid.default silu.default gelu.default
    erf.default pow.Tensor_Scalar clamp.default clamp_min.default clamp_max.default maximum.default minimum.default
    where.self addcmul.default lerp.Scalar bitwise_not.default logical_not.default bitwise_and.Tensor
    bitwise_or.Tensor hardtanh.default leaky_relu.default elu.default silu_backward.default gelu_backward.default
    tanh_backward.default sigmoid_backward.default threshold_backward.default mse_loss_backward.default
"""
_ROWWISE_NAMES = """
    _softmax.default _log_softmax.default _softmax_backward_data.default _log_softmax_backward_data.default
"""
_PRODUCT_NAMES = """
    mul.Tensor div.Tensor addcmul.default lerp.Scalar pow.Tensor_Scalar add.Tensor sub.Tensor
    silu_backward.default tanh_backward.default sigmoid_backward.default
"""
# ATen ops whose kernels read index i before they write it, and do not read it afterwards.
POINTWISE = frozenset(f"aten.{name}" for name in _POINTWISE_NAMES.split())
# ATen ops whose CPU kernels finish reading a row before they write it.
ROWWISE = frozenset(f"aten.{name}" for name in _ROWWISE_NAMES.split())
# The ops among them that multiply or divide (sums: by alpha): their kernels round complex numbers differently in place.
COMPLEX_PRODUCTS = frozenset(f"aten.{name}" for name in _PRODUCT_NAMES.split())
COPY = "aten.copy_.default"
_IN_PLACE = frozenset((COPY, ALL_REDUCE))  # ops of one read and one result that may be the same bytes


def with_inplace_candidates(graph: Graph) -> Graph:
    """Return the graph with `Op.inplace_candidates` filled in: which results may take the bytes of which inputs.

    The order decides which of them are used: the op must be the last use of the input. Outputs, gradients and storages
    that are not planned are never candidates.
    """
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    made: dict[int, int] = {}
    for index, op in enumerate(graph.ops):
        for storage in graph.touched(op):
            made.setdefault(storage, index)
    new = {op.name: {s for s in graph.written(op) if made[s] == index} - kept for index, op in enumerate(graph.ops)}
    ops = tuple(
        replace(op, inplace_candidates=tuple(_inplace_candidates(graph, op, new[op.name], kept))) for op in graph.ops
    )
    return replace(graph, ops=ops)


def with_candidates(graph: Graph, pairs: Iterable[tuple[int, int]]) -> Graph:
    """Return the graph with candidates for in-place results that its kernels are known to allow.

    Args:
        graph: The graph.
        pairs: Storages (of a result, of an input): the kernel that makes the one may write it over the other. Those
            that no plan can have are left out.
    """
    wanted = {pair for pair in pairs if _interchangeable(graph, *pair)}
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    born: set[int] = set()
    ops = []
    for op in graph.ops:
        found = []
        for result in op.writes:
            for read in op.reads:
                pair = (graph.values[result].storage, graph.values[read].storage)
                fresh = pair[0] not in born and pair[1] not in graph.written(op)
                if pair in wanted and fresh and not kept.intersection(pair):
                    found.append((result, read))
        born.update(graph.touched(op))
        ops.append(replace(op, inplace_candidates=tuple(found)) if found else op)
    return replace(graph, ops=tuple(ops))


def without_candidates(graph: Graph) -> Graph:
    """Return the graph with every result in bytes of its own, but for what a kernel itself changes."""
    return replace(graph, ops=tuple(replace(op, inplace_candidates=()) for op in graph.ops))


def _interchangeable(graph: Graph, born: int, donor: int) -> bool:
    """Return whether a storage could take the bytes of another."""
    one, two = graph.storages[born], graph.storages[donor]
    return one.planned and two.planned and (one.nbytes, one.device) == (two.nbytes, two.device)


def _inplace_candidates(graph: Graph, op: Op, new: set[int], kept: set[int]) -> Iterator[tuple[int, int]]:
    """Yield pairs (result, input), one for each result in `new` and each storage whose bytes it could take."""
    if not new or not _can_overwrite(graph, op):
        return
    for out in _whole_results(graph, op):
        if graph.values[out].storage in new:
            seen = kept | set(graph.written(op))
            for read in op.reads:
                storage = graph.values[read].storage
                if storage not in seen and _fits(graph, op, out, storage):
                    yield out, read
                seen.add(storage)


def _can_overwrite(graph: Graph, op: Op) -> bool:
    if not op.direct or op.target in POINTWISE or op.target in _IN_PLACE:
        return True
    on_cpu = all(graph.storages[s].device == "cpu" for s in graph.touched(op))
    return on_cpu and op.target in ROWWISE  # CUDA's row kernels have not been tested in place


def _whole_results(graph: Graph, op: Op) -> list[int]:
    """Return the results of `op` that fill a planned storage completely, in order."""
    return [v for v in op.writes if _spans(graph.values[v]) and graph.storages[graph.values[v].storage].planned]


def _fits(graph: Graph, op: Op, out: int, storage: int) -> bool:
    """Return whether `out` can take the bytes of `storage`, which `op` reads."""
    result, host = graph.values[out], graph.storages[storage]
    own = graph.storages[result.storage]
    if not host.planned or not host.nbytes or (host.nbytes, host.device) != (own.nbytes, own.device):
        return False
    reads = [graph.values[r] for r in op.reads if graph.values[r].storage == storage]
    if not op.direct:
        return True
    rounds = op.target in COMPLEX_PRODUCTS and result.dtype.startswith("complex")
    return not rounds and all(same_layout(r, result) for r in reads)


def same_layout(one: Value, two: Value) -> bool:
    """Return whether two values have the same dtype, shape, strides and offset in their storages."""
    return (one.dtype, one.shape, one.strides, one.offset) == (two.dtype, two.shape, two.strides, two.offset)


def _spans(value: Value) -> bool:
    """Return whether the value's elements fill its storage, each stored once."""
    return value.offset == 0 and 0 not in value.shape and value.dense
