"""Conjugates and negations that torch only notes in a bit of the tensor: here they are computed.

A view whose bytes mean something else than they say is no value of a plan. Kernels that read the bit would compute
the same conjugate as they go, and other ops have it computed before them, as it is here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedGraph
from memplan.trace.origins import place_of
from memplan.trace.returns import returned_by
from memplan.trace.rewrite import Rewriter, aten, fake_mode_of, storage_key, value

_COMPUTED = {aten._conj.default: aten.conj_physical.default, aten._neg_view.default: aten.neg.default}
_BY_STRIDES = aten.as_strided.default


def compute_conjugates(graph: fx.Graph) -> None:
    """Replace conjugated and negated views by ops that compute them, in place. `graph` is functional.

    Two of a kind after one another are none. Raises `UnsupportedGraph` where the caller gives such a view, or gets one
    of what is his.
    """
    if not any(_is_lazy(node) for node in graph.nodes):
        return
    mode = fake_mode_of(graph)
    _refuse_lazy_results(graph)
    changed: set[fx.Node] = set()
    undone: dict[fx.Node, tuple[Any, fx.Node]] = {}  # what is computed -> the view that it stands for, and of what
    for node in list(graph.nodes):
        if node.op == "placeholder" and _is_lazy(node):
            _settle_placeholder(node, mode)
            changed.add(node)
        elif node.target in _COMPUTED:
            source = node.args[0] if isinstance(node.args[0], fx.Node) else _tensor_of(node, mode)
            kind, before = undone.get(source, (None, source))
            new = before
            if kind is not node.target:
                new = Rewriter(graph, mode, node).call(_COMPUTED[node.target], source)
                undone[new] = node.target, source
            node.replace_all_uses_with(new)
            graph.erase_node(node)
            changed.add(new)
        elif node.op == "call_function" and not changed.isdisjoint(node.all_input_nodes):
            _evaluate_again(node, mode, changed)


def _settle_placeholder(node: fx.Node, mode: Any) -> None:
    """Of an incoming gradient: what it says is computed before the backward begins."""
    if not node.meta["desc"].is_tangent():
        hint = "pass x.resolve_conj().resolve_neg(), which has numbers of its own"
        raise UnsupportedGraph(node.name, "an input that is conjugated or negated by a bit of the tensor", hint)
    old = value(node)
    with mode:
        node.meta["val"] = torch.empty_strided(old.shape, old.stride(), dtype=old.dtype, device=old.device)


def _tensor_of(node: fx.Node, mode: Any) -> fx.Node:
    """The number of which a node gives the conjugate."""
    layout = {"dtype": value(node).dtype, "device": value(node).device}
    return Rewriter(node.graph, mode, node).call(aten.scalar_tensor.default, node.args[0], **layout)


def _evaluate_again(node: fx.Node, mode: Any, changed: set[fx.Node]) -> None:
    """Of an op that reads what is computed now: its views are views of that."""
    if node.target is _BY_STRIDES:
        raise UnsupportedGraph(place_of(node), "as_strided of a conjugated view", "call .resolve_conj() before it")
    old = {storage_key(t) for n in node.all_input_nodes for t in _tensors(n)}
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), value)
    with mode, torch.no_grad():
        new = node.target(*args, **kwargs)  # type: ignore[operator]
    flat = new if isinstance(new, (tuple, list)) else (new,)
    keys = {storage_key(t) for t in flat if isinstance(t, torch.Tensor)}
    if _is_lazy(node) or keys & old:
        node.meta["val"] = new
        changed.add(node)


def _refuse_lazy_results(graph: fx.Graph) -> None:
    """Raise for conjugated views of inputs that are returned: eager's share bytes and gradients with the input."""
    given = {storage_key(t) for n in graph.find_nodes(op="placeholder") for t in _tensors(n)}
    for node in returned_by(graph)[1]:
        if isinstance(node, fx.Node) and _is_lazy(node) and storage_key(value(node)) in given:
            hint = "return x.resolve_conj(), or conjugate it outside of the model"
            raise UnsupportedGraph(place_of(node), "returns a conjugated view of an input or parameter", hint)


def _is_lazy(node: fx.Node) -> bool:
    return any(t.is_conj() or t.is_neg() for t in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    val = node.meta.get("val")
    return [t for t in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(t, torch.Tensor)]
