"""In-place reuse: an op's result takes the bytes of an input that dies at that op.

Safe where the kernel reads an element only before it writes that element's place: pointwise kernels, and
those of the softmax family, which finish a row before they write it. An op that runs functionally returns
fresh memory first, so its result may go anywhere. Each entry of the list is held by a bitwise test.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.graph import Graph, Op, Value

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
# ATen ops whose kernels read index i before they write index i, and nothing of it after.
POINTWISE = frozenset(f"aten.{name}" for name in _POINTWISE_NAMES.split())
# ATen ops whose CPU kernels finish reading a row before they write it.
ROWWISE = frozenset(f"aten.{name}" for name in _ROWWISE_NAMES.split())
_COPY = "aten.copy_.default"


def reuse_in_place(graph: Graph) -> Graph:
    """The graph with results merged into dying inputs, wherever the traced order and the op allow it.

    The merge makes such an op a write after all other reads of that storage; orders that keep to
    `schedule.legal.predecessors` stay right. Outputs, gradients and what is not planned are never touched.
    """
    last_touch = {s: i for i, op in enumerate(graph.ops) for s in graph.touched(op)}
    first_touch = {s: i for i, op in reversed(list(enumerate(graph.ops))) for s in graph.touched(op)}
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    host: dict[int, int] = {}  # storage -> the one whose bytes it takes

    def root(storage: int) -> int:
        return root(host[storage]) if storage in host else storage

    for index, op in enumerate(graph.ops):
        if not _can_overwrite(graph, op):
            continue
        for out in _whole_results(graph, op):
            born = graph.values[out].storage
            if first_touch[born] != index or born in kept or born in host:
                continue
            dying = {s for s in graph.touched(op) if last_touch[s] == index} - kept - set(graph.written(op))
            found = _dying_input(graph, op, out, dying)
            if found is not None:
                host[born] = found
                break  # one input can hold one result
    values = tuple(replace(v, storage=root(v.storage)) if v.storage in host else v for v in graph.values)
    return replace(graph, values=values)


def _can_overwrite(graph: Graph, op: Op) -> bool:
    if not op.direct or op.target in POINTWISE or op.target == _COPY:
        return True
    on_cpu = all(graph.storages[s].device == "cpu" for s in graph.touched(op))
    return on_cpu and op.target in ROWWISE  # CUDA's row kernels have not been put to the test


def _whole_results(graph: Graph, op: Op) -> list[int]:
    """Results that are all of their planned storage, in order."""
    return [v for v in op.writes if _spans(graph, graph.values[v]) and graph.storages[graph.values[v].storage].planned]


def _dying_input(graph: Graph, op: Op, out: int, dying: set[int]) -> int | None:
    """The storage in `dying` of an input of `op` whose bytes can hold `out`."""
    result = graph.values[out]
    for read in op.reads:
        value = graph.values[read]
        storage = graph.storages[value.storage]
        reads = [graph.values[r] for r in op.reads if graph.values[r].storage == value.storage]
        if (
            storage.planned
            and value.storage in dying
            and storage.nbytes == graph.storages[result.storage].nbytes
            and storage.device == graph.storages[result.storage].device
            and (not op.direct or all(_same_place(r, result) for r in reads))
        ):
            return value.storage
    return None


def _same_place(one: Value, two: Value) -> bool:
    return (one.dtype, one.shape, one.strides, one.offset) == (two.dtype, two.shape, two.strides, two.offset)


def _spans(graph: Graph, value: Value) -> bool:
    """Whether the value's elements fill its storage, each once."""
    count = 1
    for n in value.shape:
        count *= n
    dense = sorted((s, n) for s, n in zip(value.strides, value.shape, strict=True) if n > 1)
    expected = 1
    for stride, n in dense:
        if stride != expected:
            return False
        expected *= n
    return value.offset == 0 and count > 0 and expected == count
