"""Add the ops of a recorded update to a graph: its tensors become nodes, its numbers are computed at every step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import fx, nn

from memplan.trace.optimizer.numbers import Item, Numeral, function_of, items_of, source_of
from memplan.trace.optimizer.recorded_update import At, RecordedUpdate, UpdateOp
from memplan.trace.passes.rewrite import INHERITED, Rewriter, aten, storage_key, value

Functions = Callable[[str, str], Callable[..., Any]]
_FILLED = {aten.zeros_like.default: 0, aten.ones_like.default: 1, aten.new_zeros.default: 0, aten.new_ones.default: 1}


def functions_of(optimizer: torch.optim.Optimizer, model: nn.Module) -> Functions:
    """Return what makes the function of a source, with the given arguments; equal sources get one function."""
    made: dict[str, Callable[..., Any]] = {}

    def kept(name: str, key: str) -> Any:
        return optimizer.state[model.get_parameter(name)][key]

    def function(source: str, arguments: str) -> Callable[..., Any]:
        if source not in made:
            made[source] = function_of(source, arguments, optimizer, kept)
        return made[source]

    return function


class RecordedOps:
    """Adds the ops of a recorded update before the node of a rewriter. `nodes`: the nodes of its values; inputs first.

    `state(name, key, value)` adds a placeholder of the optimizer's state.
    """

    def __init__(
        self,
        rewriter: Rewriter,
        recorded: RecordedUpdate,
        state: Callable[[str, str, int], fx.Node],
        functions: Functions,
    ) -> None:
        self.nodes: dict[int, fx.Node] = {}
        self._rewriter, self._recorded, self._state, self._functions = rewriter, recorded, state, functions
        self._changed = {index for op in recorded.ops for index in op.results}

    def changes(self, index: int) -> bool:
        """Return whether an op changes an input in place."""
        return index in self._changed

    def add(self) -> None:
        """Add all ops, then the copies to state that is new or replaced."""
        for op in self._recorded.ops:
            self._add(op)
        rw, recorded = self._rewriter, self._recorded
        for (name, key), index in recorded.created.items():
            rw.call(aten.copy_.default, self._state(name, key, index), self.nodes[index])
        inputs = {storage_key(value(self.nodes[index])) for index in recorded.inputs}
        new = [self.nodes[source] for _, source in recorded.replaced]
        if any(storage_key(value(node)) in inputs for node in new):  # two entries may change places
            new = [self._copy(node) for node in new]
        for (target, _), source in zip(recorded.replaced, new, strict=True):
            rw.call(aten.copy_.default, self.nodes[target], source)

    def _add(self, op: UpdateOp) -> None:
        """Add one op. Copies and filled tensors are memory and a kernel that writes it."""
        rw = self._rewriter
        if op.target is aten.clone.default and not op.kwargs.get("memory_format"):
            (source,) = op.args
            self.nodes[op.results[0]] = self._copy(self.nodes[source.value])
            return
        leaves, spec = pytree.tree_flatten((op.args, op.kwargs))
        numbers = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, At):
                leaves[position] = self.nodes[leaf.value]
            elif isinstance(leaf, Numeral):
                numbers[position] = self._number(leaf)
                leaves[position] = leaf.example
        args, kwargs = pytree.tree_unflatten(leaves, spec)
        if op.target in _FILLED:
            fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), value)
            with rw.mode:
                made = rw.memory(op.target(*fake_args, **fake_kwargs))
            rw.call(aten.fill_.Scalar, made, _FILLED[op.target])
        else:
            made = rw.call(op.target, *args, **kwargs)
        if numbers:
            made.meta["numbers"] = numbers
        several = isinstance(made.meta["val"], (list, tuple))
        for position, index in enumerate(op.results):
            if index not in self.nodes:  # an argument that the op changed keeps its node
                self.nodes[index] = self._item(made, position) if several else made

    def _item(self, made: fx.Node, position: int) -> fx.Node:
        """Return a node for one of several results of an op."""
        rw = self._rewriter
        with rw.graph.inserting_before(rw.before):
            node = rw.graph.call_function(operator.getitem, (made, position))
        node.meta.update({key: made.meta[key] for key in INHERITED if key in made.meta})
        node.meta["val"] = made.meta["val"][position]
        return node

    def _copy(self, node: fx.Node) -> fx.Node:
        with self._rewriter.mode:
            like = torch.empty_like(value(node))
        copy = self._rewriter.scratch(like)
        self._rewriter.call(aten.copy_.default, copy, node)
        return copy

    def _number(self, number: Numeral) -> tuple[str, Callable[..., Any], list[fx.Node], float]:
        """Return the source and the function of a number, the nodes that it reads, and its value as an example."""
        read_from = self._recorded.read_from
        read = list(dict.fromkeys(read_from[item.number] for item in items_of(number.expression)))

        def name(item: Item) -> str:
            return f"a{read.index(read_from[item.number])}.item()"

        source = source_of(number.expression, name)
        function = self._functions(source, ", ".join(f"a{i}" for i in range(len(read))))
        return source, function, [self.nodes[index] for index in read], number.example
