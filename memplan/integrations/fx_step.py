"""Reads the graph of a whole training step that others traced (`make_fx`) as a `Graph`, op by op."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from memplan.core.graph import Graph, Op, Phase, StorageKind, check_graph
from memplan.trace.capture.origins import origin_of
from memplan.trace.graph.values import AliasClasses
from memplan.trace.passes.nodes import draws, written_names

Predicate = Callable[[fx.Node], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class FxStep:
    """A step as a graph. `nodes` has the names of the nodes whose bytes each storage (by index) of the forward has.

    Such a node is no view, and no tuple.
    """

    graph: Graph
    nodes: Mapping[int, tuple[str, ...]]


def fx_step(graph: fx.Graph, *, is_backward: Predicate, never_again: Predicate) -> FxStep:
    """Return the step that an fx graph computes.

    What goes in and comes out is counted from the beginning, or from when it is made, to the end.

    Args:
        graph: The graph; its nodes have fake values (`node.meta["val"]`).
        is_backward: Tells whether a node belongs to the backward.
        never_again: Tells whether a node must not run twice, beside those that draw random numbers.

    Raises:
        UnsupportedGraph: A size varies from call to call, or a tensor is not plain strided memory.

    Example:
        >>> step = fx_step(gm.graph, is_backward=lambda n: n.meta.get("autograd_backward", False), never_again=bool)
    """
    reader = _StepReader(is_backward, never_again)
    for node in graph.nodes:
        reader.read(node)
    return reader.result(graph)


class _StepReader:
    """Reads nodes in their order."""

    def __init__(self, is_backward: Predicate, never_again: Predicate) -> None:
        self.is_backward, self.never_again = is_backward, never_again
        self.classes = AliasClasses()
        self.value_of: dict[fx.Node, tuple[int, ...]] = {}
        self.ops: list[Op] = []
        self.nodes: dict[int, tuple[str, ...]] = {}

    def read(self, node: fx.Node) -> None:
        """Add the values of a node, and its op unless it is a view."""
        if node.op == "call_function" and node.target is operator.getitem:
            self._item(node)
            return
        before = len(self.classes.storages)
        values = self._values(node)
        self.value_of[node] = values
        if node.op != "call_function":
            return
        made = range(before, len(self.classes.storages))
        written = self._written(node)
        if not made and not written:
            return
        backward = self.is_backward(node)
        reads = tuple(dict.fromkeys(v for n in node.all_input_nodes for v in self.value_of.get(n, ())))
        fresh = tuple(v for v in values if self.classes.values[v].storage in made)
        again = not (self.never_again(node) or draws(node.target, node.args, node.kwargs))
        self.ops.append(
            Op(
                name=node.name,
                target=str(node.target),
                phase=Phase.BACKWARD if backward else Phase.FORWARD,
                reads=reads,
                writes=(*fresh, *(v for v in written if v not in fresh)),
                direct=True,
                random=not again,
                origin=origin_of(node),
            )
        )
        if not backward and isinstance(node.meta.get("val"), torch.Tensor):
            self.nodes.update({self.classes.values[v].storage: (node.name,) for v in fresh})

    def result(self, graph: fx.Graph) -> FxStep:
        """Return what was read; ops of the forward come first, and what is returned stays to the end."""
        (output,) = graph.find_nodes(op="output")
        made = {self.classes.values[v].storage for op in self.ops for v in op.writes}
        ends: dict[int, int] = {}
        for node in output.all_input_nodes:
            for v in self.value_of.get(node, ()):
                if self.classes.values[v].storage in made:
                    ends.setdefault(self.classes.values[v].storage, v)
        found = Graph(
            ops=tuple(sorted(self.ops, key=lambda op: op.phase is Phase.BACKWARD)),
            values=tuple(self.classes.values),
            storages=self.classes.sized(),
            outputs=(),
            gradients=tuple(ends.values()),
        )
        check_graph(found)
        return FxStep(graph=found, nodes=self.nodes)

    def _item(self, node: fx.Node) -> None:
        """Add an item of a node's results, which is one of its values."""
        source, index = node.args
        assert isinstance(source, fx.Node)
        assert isinstance(index, int)
        values = self.value_of.get(source, ())
        results = source.meta.get("val")
        tensors = [i for i, r in enumerate(results) if isinstance(r, torch.Tensor)] if results is not None else []
        self.value_of[node] = (values[tensors.index(index)],) if index in tensors and values else ()
        if self.value_of[node] and not self.is_backward(node):
            storage = self.classes.values[self.value_of[node][0]].storage
            self.nodes.setdefault(storage, (node.name,))

    def _values(self, node: fx.Node) -> tuple[int, ...]:
        """Add a value for each tensor that a node makes, and return their indices."""
        results = [r for r in pytree.tree_leaves(node.meta.get("val")) if isinstance(r, torch.Tensor)]
        if node.op == "output":
            return ()
        given = node.op != "call_function"
        made = StorageKind.GRADIENT if self.is_backward(node) else StorageKind.ACTIVATION
        kind = StorageKind.PARAMETER if given else made
        found = []
        for i, result in enumerate(results):
            name = node.name if i == 0 else f"{node.name}:{i}"
            storage = self.classes.storage(result, name, kind, planned=not given, origin=origin_of(node))
            found.append(self.classes.value(result, name, storage))
        return tuple(found)

    def _written(self, node: fx.Node) -> tuple[int, ...]:
        """Return the values that an op writes in place."""
        if not isinstance(node.target, OpOverload):
            return ()
        names = [a.name for a in node.target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        targets: list[fx.Node] = []
        fx.node.map_arg([given[name] for name in written_names(node.target) if name in given], targets.append)
        return tuple(v for target in targets for v in self.value_of.get(target, ()))
