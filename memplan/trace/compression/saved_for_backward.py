"""Find the storages of a functional graph that are saved for the backward and unused in between."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import storage_key, value


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedStorage:
    """A storage that an op of the forward makes, whose last use there comes before its first use in the backward.

    `aliases`: its tensors, the one that it was made for first. `after`, `before`: the nodes between which nothing uses
    it. `later`: the nodes of the backward that read it. No other op writes it, and it is not returned.
    """

    aliases: list[fx.Node]
    after: fx.Node
    before: fx.Node
    later: list[fx.Node]

    @property
    def base(self) -> fx.Node:
        """The tensor that the storage was made for."""
        return self.aliases[0]

    @property
    def following(self) -> fx.Node:
        """The node before which a node can be inserted so that it comes after the last use in the forward."""
        node: fx.Node = self.after.next
        while node.op == "placeholder":
            node = node.next
        return node


def saved_storages(graph: fx.Graph) -> Iterator[SavedStorage]:
    """Yield every such storage of the graph; each may be rewritten before the next is requested."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    groups: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            groups.setdefault(storage_key(value(node)), []).append(node)
    for key, group in list(groups.items()):
        if group[0].op != "call_function" or is_backward(group[0]):
            continue
        users = [user for node in group for user in node.users if user not in group]
        parts = {user for user in users if _is_split(user, key)}
        if not all(_only_reads(user) for user in users):
            continue
        later = list(dict.fromkeys(user for user in users if user not in parts and is_backward(user)))
        if not later:
            continue
        forward = [node for node in (*group, *users) if not is_backward(node)]
        after, before = max(forward, key=place.__getitem__), min(later, key=place.__getitem__)
        if place[after] < place[before]:
            yield SavedStorage(aliases=group, after=after, before=before, later=later)


def _is_split(user: fx.Node, key: int) -> bool:
    """Return whether the results of `user` are views of the storage."""
    parts = user.meta.get("val")
    tensors = [p for p in parts if isinstance(p, torch.Tensor)] if isinstance(parts, (tuple, list)) else []
    return bool(tensors) and all(storage_key(part) == key for part in tensors)


def _only_reads(user: fx.Node) -> bool:
    """Return whether an op writes none of its arguments."""
    schema = getattr(user.target, "_schema", None)
    return user.op == "call_function" and schema is not None and not schema.is_mutable
