"""Compute conjugates and negations that torch only records in a bit of the tensor (lazy views).

The bytes of such a view do not hold its values, so it cannot be a value of a plan. Kernels that read the bit would
compute the same conjugate as they run, and other ops have it computed before them, as is done here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedGraph
from memplan.trace.capture.origins import place_of
from memplan.trace.passes.own_outputs import is_backward, returned_by
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, storage_key, value

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
    given = {storage_key(t) for n in graph.find_nodes(op="placeholder") for t in _tensors(n)}
    for node in returned_by(graph)[1]:
        if isinstance(node, fx.Node) and _is_lazy(node) and storage_key(value(node)) in given:
            hint = "return x.resolve_conj(), or conjugate it outside of the model"
            raise UnsupportedGraph(
                place_of(node), "returns a conjugated view of an input or parameter", hint, see="conjugate"
            )


def _is_lazy(node: fx.Node) -> bool:
    """Return whether a node makes a conjugated or negated view."""
    return any(t.is_conj() or t.is_neg() for t in _tensors(node))


def _tensors(node: fx.Node) -> list[torch.Tensor]:
    """Return the fake tensors that a node makes."""
    val = node.meta.get("val")
    return [t for t in (val if isinstance(val, (tuple, list)) else (val,)) if isinstance(t, torch.Tensor)]
