"""Correct a joint graph where fake CPU kernels differ from the real ones.

That is in layouts, types of statistics, and lazy conjugates.

Where a fake kernel follows the strides of an argument and the real one does not, everything computed from the result
would be laid out differently than in eager, and sums over it would add in another order. The trace therefore copies
such a result to the layout that the kernel gives, before anything else uses it (`layout_decompositions`). Afterwards
such copies are removed: the kernel itself makes that layout (`settle_layouts`). `tests/trace/test_layouts.py` compares
the table with the kernels.

With half-precision activations and float32 parameters, as under autocast, the kernels of normalisations make float32
statistics. The fake kernels make half-precision ones, which no backward would accept (`correct_statistics`).

Conjugates and negations that torch only records in a bit of the tensor (lazy views) cannot be values of a plan: the
bytes do not hold the values. Kernels that read the bit would compute the same conjugate as they run, and other ops
have it computed before them, as is done here (`compute_conjugates`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._prims_common import (
    compute_elementwise_output_strides,
    make_channels_last_strides_for,
    make_contiguous_strides_for,
    suggest_memory_format,
)

from memplan.errors import UnsupportedGraph
from memplan.trace.capture.origins import place_of
from memplan.trace.passes.nodes import is_fixed, tensors_of
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, correct_results, fake_mode_of, storage_key, value

Layout = Callable[..., Any]  # the shape of a result, the op's arguments -> its strides (None: the fake's)
_LAYER_NORM_BACKWARD = aten.native_layer_norm_backward.default


def _dense(shape: tuple[int, ...], *args: Any) -> Any:
    """Return the strides of a contiguous tensor."""
    return make_contiguous_strides_for(shape)


def _formatted(position: int) -> Layout:
    """Return the layout "contiguous, or channels last where the argument at `position` is".

    Statistics, which have fewer dimensions, keep the fake's layout.
    """

    def layout(shape: tuple[int, ...], *args: Any) -> Any:
        """Return the strides, or None for a result with fewer dimensions."""
        if args[position].dim() != len(shape):
            return None
        dense = suggest_memory_format(args[position]) is torch.contiguous_format
        return (make_contiguous_strides_for if dense else make_channels_last_strides_for)(shape)

    return layout


def _pointwise(*positions: int) -> Layout:
    """Return the layout of the first of these arguments that determines one, without its gaps.

    It applies only to results that have the shape of each of them.
    """

    def layout(shape: tuple[int, ...], *args: Any) -> Any:
        """Return the strides, or None for a result of another shape."""
        if any(tuple(args[position].shape) != tuple(shape) for position in positions):
            return None
        return compute_elementwise_output_strides(*(args[position] for position in positions))

    return layout


def _resized(shape: tuple[int, ...], x: torch.Tensor, *args: Any) -> Any:
    """Return the layout of the resized tensor, without gaps, if it has the shape already, else the contiguous one."""
    return _pointwise(0)(shape, x) or make_contiguous_strides_for(shape)


LAYOUTS: dict[Any, Layout] = {
    **dict.fromkeys(
        (
            *(aten.mse_loss_backward.default, aten.smooth_l1_loss_backward.default, aten.huber_loss_backward.default),
            *(aten.glu_backward.default, aten.log_sigmoid_forward.default, aten._log_softmax_backward_data.default),
            *(aten.normal.float_Tensor, aten.normal.Tensor_Tensor, aten.poisson.default, aten._standard_gamma.default),
            *(aten.pow.Scalar, aten.nll_loss2d_forward.default),
        ),
        _dense,
    ),
    **dict.fromkeys(
        (
            *(aten.native_batch_norm.default, aten._native_batch_norm_legit.default),
            *(aten._native_batch_norm_legit.no_stats, aten._native_batch_norm_legit_no_training.default),
            *(aten._native_batch_norm_legit_functional.default, aten._batch_norm_no_update.default),
            *(aten._batch_norm_with_update_functional.default, aten.max_unpool2d.default, aten.roll.default),
            *(aten.replication_pad3d.default, aten.reflection_pad3d.default, aten.channel_shuffle.default),
        ),
        _formatted(0),
    ),
    **dict.fromkeys(
        (
            *(aten.native_batch_norm_backward.default, aten.native_group_norm_backward.default),
            *(aten.batch_norm_backward.default, aten.replication_pad2d_backward.default),
            *(aten.replication_pad3d_backward.default, aten.reflection_pad2d_backward.default),
            aten.reflection_pad3d_backward.default,
        ),
        _formatted(1),
    ),
    aten.resize_as.default: _resized,
    **dict.fromkeys((aten.binary_cross_entropy.default, aten.huber_loss.default), _pointwise(0)),
    aten.binary_cross_entropy_backward.default: _pointwise(1),
    **dict.fromkeys(
        (
            *(aten.hardswish_backward.default, aten.hardsigmoid_backward.default, aten.hardtanh_backward.default),
            *(aten.softplus_backward.default, aten.logit_backward.default, aten.native_dropout_backward.default),
            *(aten.xlogy.Tensor, aten.special_xlog1py.default),
        ),
        _pointwise(0, 1),
    ),
    aten.elu_backward.default: _pointwise(0, 5),
    aten.log_sigmoid_backward.default: _pointwise(0, 2, 1),
    **dict.fromkeys((aten.threshold_backward.default, aten.leaky_relu_backward.default), _pointwise(1, 0)),
}


def layout_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return decompositions for one trace, under which results are laid out as the CPU kernels lay them out."""
    return {
        _LAYER_NORM_BACKWARD: _layer_norm_backward,
        **{op: _laid_out(op, layout) for op, layout in LAYOUTS.items()},
    }


def settle_layouts(graph: fx.Graph) -> None:
    """Let ops write directly what is copied to the layout that their kernels give, in place."""
    for node in list(graph.nodes):
        layout = LAYOUTS.get(node.target)
        if layout is None:
            continue
        args: Any = fx.node.map_arg(node.args, value)
        single = isinstance(value(node), torch.Tensor)
        results = [value(node)] if single else list(value(node))
        for position, made in [(0, node)] if single else _items(node):
            copied = _copied(made)
            if copied is None or value(made).device.type != "cpu" or not is_fixed(value(made)):
                continue
            strides = layout(value(made).shape, *args)
            if strides is None or not _is_laid_out(value(copied[-1]), strides):
                continue
            results[position] = value(copied[-1])
            copied[-1].replace_all_uses_with(made)
            for link in reversed(copied):
                graph.erase_node(link)
        if single:
            node.meta["val"] = results[0]
        else:
            correct_results(node, results)


def _laid_out(op: Any, layout: Layout) -> Callable[..., Any]:
    """Return a decomposition: `op`, then copies of those results whose fake layout differs from the kernel's."""
    under_way = False

    def decomposition(*args: Any, **kwargs: Any) -> Any:
        """Call `op` and copy its results to the layouts that the kernel gives."""
        nonlocal under_way
        given = [a for a in args if isinstance(a, torch.Tensor)]
        if under_way or kwargs or given[0].device.type != "cpu" or not all(map(is_fixed, given)):
            return NotImplemented  # symbols would become guards
        under_way = True
        try:
            made = op(*args)
        finally:
            under_way = False
        results = [made] if isinstance(made, torch.Tensor) else list(made)
        results = [_copy_to(t, layout(t.shape, *args)) if isinstance(t, torch.Tensor) else t for t in results]
        return results[0] if isinstance(made, torch.Tensor) else tuple(results)

    return decomposition


def _is_laid_out(tensor: torch.Tensor, strides: Sequence[Any]) -> bool:
    """Return whether a tensor has these strides, dimensions of one element aside."""
    return all(n == 1 or s == t for n, s, t in zip(tensor.shape, tensor.stride(), strides, strict=True))


def _copy_to(tensor: torch.Tensor, strides: Sequence[Any] | None) -> torch.Tensor:
    """Return a copy of a dense tensor with these strides; the tensor itself if it has them, or if they are None."""
    if strides is None or _is_laid_out(tensor, strides):
        return tensor
    order = sorted(range(tensor.dim()), key=lambda dim: strides[dim], reverse=True)
    copied = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return copied.permute([order.index(dim) for dim in range(tensor.dim())])


def _items(node: fx.Node) -> Iterator[tuple[int, fx.Node]]:
    """Yield the results of an op that something reads, each with its position."""
    for user in list(node.users):
        if user.target is operator.getitem:
            position: Any = user.args[1]
            yield position, user


def _copied(made: fx.Node) -> list[fx.Node] | None:
    """Return the chain of nodes that copies `made`, as `_copy_to` does; None if it is not only copied."""
    chain, node = [], made
    for target in (aten.permute.default, aten.clone.default, aten.permute.default):
        users = list(node.users)
        if len(users) != 1 or users[0].target is not target:
            return None
        node = users[0]
        chain.append(node)
    return chain


def _layer_norm_backward(grad: torch.Tensor, x: torch.Tensor, *rest: Any) -> Any:
    """Make both arguments contiguous first, as the kernels do; the gradient that they return is contiguous too.

    The fake kernel follows the strides of its arguments instead.
    """
    if x.is_contiguous() and grad.is_contiguous():
        return NotImplemented
    return _LAYER_NORM_BACKWARD(grad.contiguous(), x.contiguous(), *rest)


_STATISTICS = (1, 2)  # positions among the results: mean, and reciprocal of the deviation
_NORMALISATIONS = {
    *(aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default),
    *(aten._native_batch_norm_legit.default, aten._native_batch_norm_legit.no_stats),
    *(aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit_no_training.default),
    *(aten._batch_norm_with_update_functional.default, aten._batch_norm_no_update.default),
}


def correct_statistics(graph: fx.Graph) -> None:
    """Give statistics the type that the kernels give them, in place."""
    for node in list(graph.nodes):
        if node.target in _NORMALISATIONS and _is_mixed(node):
            with fake_mode_of(graph):
                made = [v.float() if i in _STATISTICS else v for i, v in enumerate(value(node))]
            correct_results(node, made)


def _is_mixed(node: fx.Node) -> bool:
    """Return whether the kernel computes in float32 because its parameters are float32."""
    x, *others = (value(n) for n in node.args if isinstance(n, fx.Node))
    half = x.device.type == "cpu" and x.dtype in {torch.bfloat16, torch.float16}
    return half and any(t.dtype is torch.float32 for t in others if isinstance(t, torch.Tensor))


_CONJUGATE, _NEGATE = aten.conj_physical.default, aten.neg.default
_LAZY = {aten._conj.default, aten._neg_view.default}


def compute_conjugates(graph: fx.Graph) -> None:
    """Replace conjugated and negated views by ops that compute them where an op needs them, in place.

    `graph` is functional. Raises `UnsupportedGraph` where the caller passes such a view as an input, or is returned one
    of an input.
    """
    if any(_is_lazy(node) or node.target in _LAZY for node in graph.nodes):
        _refuse_lazy_results(graph)
        _LazyViewResolver(graph).resolve()


class _LazyViewResolver:
    """Walks a graph once; `plain` maps a lazy view to the same view without its conjugate and negative bits."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.mode = fake_mode_of(graph)
        self.plain: dict[fx.Node, fx.Node] = {}
        self.computed: dict[fx.Node, fx.Node] = {}  # incoming gradients, which are ordinary tensors

    def resolve(self) -> None:
        """Replace every lazy view of the graph."""
        for node in list(self.graph.nodes):
            lazy = [n for n in node.all_input_nodes if n in self.plain]
            if node.op == "placeholder" and _is_lazy(node):
                self._placeholder(node)
            elif node.target in _LAZY:
                source = node.args[0] if isinstance(node.args[0], fx.Node) else self._tensor_of(node)
                self._view(node, self.plain.get(source, source))
            elif _is_lazy(node):
                view = Rewriter(self.graph, self.mode, node)
                self._view(node, view.call(node.target, *fx.node.map_arg(node.args, self._without_bits), **node.kwargs))
            else:
                for n in lazy:
                    node.replace_input_with(n, self._numbers(n, node))
        for node in reversed(self.plain):
            if node.op != "placeholder":
                self.graph.erase_node(node)

    def _without_bits(self, node: fx.Node) -> fx.Node:
        """Return the same view without its bits; the node itself if it is not lazy."""
        return self.plain.get(node, node)

    def _view(self, node: fx.Node, plain: fx.Node) -> None:
        """Record what a lazy view is without its bits; replace a view that is not lazy by that."""
        if _is_lazy(node):
            self.plain[node] = plain
            return
        node.replace_all_uses_with(plain)
        self.graph.erase_node(node)

    def _numbers(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """Return the values of a lazy view: computed for one op that reads it, or, for an output, where the view is
        made.
        """
        if node in self.computed:
            return self.computed[node]
        if user.op != "output":
            return self._computed(Rewriter(self.graph, self.mode, user), self.plain[node], value(node))
        rewriter = Rewriter(self.graph, self.mode, node, before=node.next)
        made = self._computed(rewriter, self.plain[node], value(node))
        if value(made).stride() == value(node).stride():
            return made
        laid_out = rewriter.scratch(value(node))  # keeps the gaps of a view
        rewriter.call(aten.copy_.default, laid_out, made)
        return laid_out

    @staticmethod
    def _computed(rewriter: Rewriter, made: fx.Node, of: torch.Tensor) -> fx.Node:
        """Return `made`, conjugated and negated as the bits of `of` say."""
        for is_set, target in ((of.is_conj(), _CONJUGATE), (of.is_neg(), _NEGATE)):
            made = rewriter.call(target, made) if is_set else made
        return made

    def _placeholder(self, node: fx.Node) -> None:
        """Make an incoming gradient an ordinary tensor; the lazy tensor becomes a view that undoes the bits."""
        if not node.meta["desc"].is_tangent():
            hint = "pass x.resolve_conj().resolve_neg(), which is an ordinary tensor"
            raise UnsupportedGraph(
                node.name, "an input whose conjugation or negation is lazy, a bit of the tensor", hint, see="conjugate"
            )
        old = value(node)
        with self.mode:
            node.meta["val"] = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)
        first = next(n for n in self.graph.nodes if n.op == "call_function" and is_backward(n))
        rewriter = Rewriter(self.graph, self.mode, node, before=first)
        rewriter.phase = "is_backward"
        undone = self._computed(rewriter, node, old)
        users = [n for n in node.users if n is not undone]
        stand_in = self._stand_in(node, old, first)
        for user in users:
            user.replace_input_with(node, stand_in)
        self.plain[stand_in], self.computed[stand_in] = undone, node

    def _stand_in(self, node: fx.Node, val: torch.Tensor, before: fx.Node) -> fx.Node:
        """Return a node for the lazy view that an incoming gradient was; it is erased when the pass ends."""
        with self.graph.inserting_before(before):
            made = self.graph.create_node("call_function", aten.alias.default, (node,), name=f"{node.name}_lazy")
        made.meta["val"] = val
        return made

    def _tensor_of(self, node: fx.Node) -> fx.Node:
        """Return the number that a node conjugates as a tensor; its conjugate where the trace has no bit for it."""
        number: Any = node.args[0]
        if not _is_lazy(node):
            number = number.conjugate() if node.target is aten._conj.default else -number
        layout = {"dtype": value(node).dtype, "device": value(node).device}
        return Rewriter(self.graph, self.mode, node).call(aten.scalar_tensor.default, number, **layout)


def _refuse_lazy_results(graph: fx.Graph) -> None:
    """Raise `UnsupportedGraph` for returned conjugated views of inputs: eager's share bytes and gradients with the
    input.
    """
    given = {storage_key(t) for n in graph.find_nodes(op="placeholder") for t in tensors_of(n)}
    for node in returned_by(graph)[1]:
        if isinstance(node, fx.Node) and _is_lazy(node) and storage_key(value(node)) in given:
            hint = "return x.resolve_conj(), or conjugate it outside of the model"
            raise UnsupportedGraph(
                place_of(node), "returns a conjugated view of an input or parameter", hint, see="conjugate"
            )


def _is_lazy(node: fx.Node) -> bool:
    """Return whether a node makes a conjugated or negated view."""
    return any(t.is_conj() or t.is_neg() for t in tensors_of(node))
