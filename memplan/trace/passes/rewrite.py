"""Change a captured graph: new nodes with fake values, and with the origin of the node that they replace."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.graphs import FakeTensor, FakeTensorMode

CHECKPOINT = (
    "memplan_checkpoint"  # key of a node's meta: the number of the activation checkpoint that drops its results
)
WITHIN = "memplan_within"  # key of a node's meta: the numbers of the checkpoints around that one, from the outermost
INHERITED = (
    "stack_trace",
    "nn_module_stack",
    "partitioner_tag",
    "fwd_nn_module_stack",
    "autograd_backward",
    CHECKPOINT,
    WITHIN,
)
aten = torch.ops.aten
# Ops that make memory and write nothing.
MEMORY_ONLY = {aten.empty_strided.default, aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default}
VIEWS = {aten.view.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default}
_ALIASES = (aten.detach.default, aten.alias.default)


class Rewriter:
    """Inserts nodes before `before` (default: `node`) with the name and origin of `node`, evaluated on fake tensors."""

    label = ""  # the name of new nodes; "": the node's and the op's
    written: frozenset[int] | set[int] = frozenset()  # storages that ops wrote in place before the pass
    phase: str | None = None  # the tag of new nodes; None: the node's own
    checkpoint: int = 0  # the activation checkpoint that drops results of new nodes; 0: the node's own
    also: Mapping[str, Any] = MappingProxyType({})  # further metadata of new nodes
    made: set[fx.Node] | None = None  # collects new nodes

    def __init__(self, graph: fx.Graph, mode: FakeTensorMode, node: fx.Node, before: fx.Node | None = None) -> None:
        self.graph = graph
        self.mode = mode
        self.node = node
        self.before = before or node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of `target` and return it; its value is computed on the fake values of its arguments.

        An out overload is not run (some have no fake kernel): its results are the tensors that it is given to write.
        """
        new = self._node(target, args, kwargs)
        outs = [value(kwargs[a.name]) for a in target._schema.arguments if a.is_out]
        if outs:
            new.meta["val"] = outs[0] if len(outs) == 1 else tuple(outs)
            return new
        fake_args, fake_kwargs = fx.node.map_arg((args, kwargs), value)
        with self.mode, torch.no_grad():
            new.meta["val"] = target(*fake_args, **fake_kwargs)
        return new

    def instead(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add the one call that replaces the node and takes over its fake value; otherwise like `call`."""
        return self.making(value(self.node), target, *args, **kwargs)

    def making(self, result: Any, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call whose value is to be `result`, a fake result of the node; otherwise like `call`."""
        new = self._node(target, args, kwargs)
        new.meta["val"] = result
        return new

    def memory(self, result: torch.Tensor) -> fx.Node:
        """Add uninitialised memory that *is* `result`, a fake result of the node: no kernel, only bytes.

        It keeps the fake tensor, so that views made of it elsewhere in the graph are views of this memory.
        """
        layout = {"dtype": result.dtype, "device": result.device}
        taken = [
            storage_key(value(n)) for n in self.node.all_input_nodes if isinstance(n.meta.get("val"), torch.Tensor)
        ]
        assert storage_key(result) not in taken, f"{self.node} returns an alias of an argument"
        new = self._node(aten.empty_strided.default, (list(result.shape), list(result.stride())), layout, "out")
        new.meta["val"] = result
        return new

    def scratch(self, like: torch.Tensor) -> fx.Node:
        """Add uninitialised memory laid out as `like`, with a storage of its own."""
        with self.mode:
            return self.memory(torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device))

    def _node(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], suffix: str = "") -> fx.Node:
        """Add a node with the origin and the phase of the rewriter's node."""
        name = self.label or f"{self.node.name}_{suffix or target._opname.strip('_')}"
        with self.graph.inserting_before(self.before):
            new = self.graph.create_node("call_function", target, args, kwargs, name=name)
        new.meta.update({key: self.node.meta[key] for key in INHERITED if key in self.node.meta})
        if self.phase is not None:
            new.meta["partitioner_tag"] = self.phase
        if self.checkpoint:
            new.meta[CHECKPOINT] = self.checkpoint
            new.meta.pop(WITHIN, None)
        new.meta.update(self.also)
        if self.made is not None:
            self.made.add(new)
        return new


def correct_results(node: fx.Node, results: Sequence[Any]) -> None:
    """Replace the fake results of an op by what its kernel makes; aliases of a corrected result are replaced by it."""
    said = value(node)
    node.meta["val"] = tuple(results)
    for item in [user for user in node.users if user.target is operator.getitem]:
        position: Any = item.args[1]
        if results[position] is said[position]:
            continue
        item.meta["val"] = results[position]
        while aliases := [user for user in item.users if user.target in _ALIASES]:
            aliases[0].replace_all_uses_with(item)
            item.graph.erase_node(aliases[0])


def replace_by(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    """Replace `node` by `other`, which has its shape, strides and dtype; views of `node` become views of `other`."""
    old, mode = storage_key(value(node)), fake_mode_of(graph)
    views = dict.fromkeys(node.users)
    node.replace_all_uses_with(other)
    graph.erase_node(node)
    recompute_views(views, old, mode)


def redirect(graph: fx.Graph, node: fx.Node, other: fx.Node) -> None:
    """Let all that reads `node` read `other`, which is made of it and has its layout; views of it become views of
    that.
    """
    views = {user: None for user in node.users if user is not other}
    node.replace_all_uses_with(other, delete_user_cb=lambda user: user is not other)
    recompute_views(views, storage_key(value(node)), fake_mode_of(graph))


def separate_tangents(graph: fx.Graph) -> None:
    """Give each incoming gradient bytes of its own; gradients of several views of one tensor are traced as views."""
    mode = fake_mode_of(graph)
    given = [n for n in graph.find_nodes(op="placeholder") if isinstance(n.meta.get("val"), torch.Tensor)]
    seen = {storage_key(value(n)) for n in given if not n.meta["desc"].is_tangent()}
    for node in given:
        if not node.meta["desc"].is_tangent():
            continue
        traced, old = value(node), storage_key(value(node))
        if old in seen:
            with mode:
                node.meta["val"] = traced.new_empty_strided(traced.shape, traced.stride())
            recompute_views(dict.fromkeys(node.users), old, mode)
        seen.add(storage_key(value(node)))


def recompute_views(views: dict[fx.Node, None], old: int, mode: FakeTensorMode) -> None:
    """Compute the fake values of those nodes that lie in the storage `old` again, and of their views."""
    while views:
        user = next(iter(views))
        del views[user]
        if user.op == "call_function" and _shares(user.meta.get("val"), old):
            args, kwargs = fx.node.map_arg((user.args, user.kwargs), value)
            with mode, torch.no_grad():
                user.meta["val"] = user.target(*args, **kwargs)  # type: ignore[operator]
            views.update(dict.fromkeys(user.users))


def _shares(val: Any, key: int) -> bool:
    """Return whether a fake value, or one of several, lies in this storage."""
    flat = val if isinstance(val, (tuple, list)) else (val,)
    return any(isinstance(t, torch.Tensor) and storage_key(t) == key for t in flat)


def copy_of(graph: fx.Graph) -> fx.Graph:
    """Return a graph of the same nodes, with the same names and fake values, for other passes to change."""
    new = fx.Graph()
    result = new.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(result, tuple)
    new.output(result[0]).meta.update(result[1].meta)
    return new


def value(node: fx.Node) -> Any:
    """Return the fake value of a node."""
    return node.meta["val"]


def fake_mode_of(graph: fx.Graph) -> FakeTensorMode:
    """Return the mode that the graph was traced under (a new one if it holds no tensor at all)."""
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            mode: FakeTensorMode = node.meta["val"].fake_mode
            return mode
    return FakeTensorMode()


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of a fake tensor's storage: equal keys mean aliased bytes.

    Raises `UnsupportedGraph` for a tensor without a storage.
    """
    if tensor.layout is not torch.strided:
        raise UnsupportedGraph(
            f"a {tensor.layout} tensor", "is not plain strided memory", "use dense tensors", see="strided"
        )
    key: int = tensor.untyped_storage()._cdata
    return key
