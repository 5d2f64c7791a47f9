"""Compress what is saved for the backward (`compress=`): activations as 8-bit codes, in memory of their own.

Activations become codes with a bounded error: ActNN (Chen et al., ICML 2021).

A storage of floating point numbers is cut into groups of up to 256 elements, in the order of its bytes. For each
group, its minimum `lo` and a step of `(hi - lo) / 255` are kept, and for each element the number of steps above `lo`,
rounded to the nearest (half to even: nothing is random). What the backward reads instead of `x` is `lo + code * step`.
With `M` the largest magnitude in the group,

|x - x'| <= (hi - lo) / 510 + 4 * eps * M + tiny

where `eps` and `tiny` are those of the type that this is computed in: the tensor's own, or float32 for half precision,
which adds its own rounding, half an ulp of `x'`. Groups of equal elements, and the minimum of every group, are exact.
In a group with a nan or an infinity, or whose `hi - lo` overflows, every element becomes a nan or an infinity.

The forward is not changed, only what the backward reads. Some saved storages stay as they are: those that are small or
would not shrink enough; further results of a kernel (statistics of a norm, an attention's logsumexp), whose errors
would cost more than their bytes bring; attention masks; and what depends on no parameter and no input of real numbers
(positions, masks, tables).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from memplan.core.evictions import PACKED, PACKING, UNPACKED, UNPACKING
from memplan.torch_inside.graphs import ParamAOTInput, PlainAOTInput
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, storage_key, value


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


def _read_instead(graph: fx.Graph, rw: Rewriter, saved: SavedStorage, made: fx.Node) -> None:
    """Let the backward read `made` in the place of a storage, by views like those that it reads of that."""
    first = value(saved.base).storage_offset()
    for alias in saved.aliases:
        users = [user for user in alias.users if user in saved.later]
        if users:
            rw.label = f"{alias.name}_again"
            seen = value(alias)
            offset = seen.storage_offset() - first
            again = rw.call(aten.as_strided.default, made, list(seen.shape), list(seen.stride()), offset)
            for user in users:
                user.replace_input_with(alias, again)
    for view in reversed(saved.aliases[1:]):  # and what it is a result of, if nothing uses that either
        source = view.args[0]
        if not view.users:
            graph.erase_node(view)
            if view.target is operator.getitem and isinstance(source, fx.Node) and not source.users:
                graph.erase_node(source)


GROUP = 256  # elements, at most
_STEPS = 255
_SMALL = 1024  # bytes
_PAYS = 0.6  # the largest share of the bytes that is worth it: half precision is just below
_MASKS = ("attn_bias", "attn_mask")
_COMPUTED_IN = {
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float32: torch.float32,
    torch.float64: torch.float64,
}


def quantize(graph: fx.Graph) -> None:
    """Save every activation that can be coded as codes, in place."""
    mode = fake_mode_of(graph)
    learned = _learned(graph)
    for saved in saved_storages(graph):
        if saved.base in learned and _can_be_coded(saved):
            _quantize(graph, mode, saved)


def group_of(numel: int) -> int:
    """Return the number of elements in a group: the largest divisor of `numel` up to `GROUP`."""
    return next(size for size in range(GROUP, 0, -1) if numel % size == 0)


def _pays(like: torch.Tensor) -> bool:
    """Return whether codes take enough fewer bytes than a tensor."""
    numel, size = like.numel(), like.element_size()
    if numel * size < _SMALL:
        return False
    kept = numel + 2 * (numel // group_of(numel)) * _COMPUTED_IN[like.dtype].itemsize
    return kept <= _PAYS * numel * size


def _can_be_coded(saved: SavedStorage) -> bool:
    """Return whether a saved storage can be kept as codes."""
    base, v = saved.base, value(saved.base)
    if v.dtype not in _COMPUTED_IN or not _is_dense(v) or not _pays(v):
        return False
    if base.target is operator.getitem and base.args[1] != 0:
        return False
    if any(value(alias).dtype is not v.dtype or not _inside(value(alias), v) for alias in saved.aliases):
        return False
    return not any(_is_mask(alias, user) for alias in saved.aliases for user in saved.later)


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements are adjacent in memory, in any order of dimensions."""
    expected = 1
    for stride, n in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if n != 1:
            if stride != expected:
                return False
            expected *= n
    return True


def _inside(alias: torch.Tensor, whole: torch.Tensor) -> bool:
    """Return whether `alias` lies within the bytes of `whole`."""
    first = alias.storage_offset() - whole.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(alias.shape, alias.stride(), strict=True))
    return first >= 0 and (alias.numel() == 0 or last < whole.numel())


def _is_mask(node: fx.Node, user: fx.Node) -> bool:
    """Return whether `user` takes `node` as an attention mask."""
    target: Any = user.target
    given = dict(zip((a.name for a in target._schema.arguments), user.args, strict=False)) | user.kwargs
    return any(given.get(name) is node for name in _MASKS)


def _learned(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that depend on a parameter or on an input of real numbers."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            val = node.meta.get("val")
            real = isinstance(val, torch.Tensor) and val.is_floating_point()
            if real and isinstance(node.meta["desc"], (ParamAOTInput, PlainAOTInput)):
                found.add(node)
        elif any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def _quantize(graph: fx.Graph, mode: Any, saved: SavedStorage) -> None:
    """Keep one saved storage as codes, and let the backward read the decoded one."""
    base, v = saved.base, value(saved.base)
    codes, low, step = _coded(Rewriter(graph, mode, base, before=saved.following), base)
    rw = Rewriter(graph, mode, base, before=saved.before)
    rw.phase = "is_backward"
    _read_instead(graph, rw, saved, _decoded(rw, codes, low, step, v))


def _coded(rw: Rewriter, base: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Return codes, minimum and step of each group; the tensor's own bytes are overwritten."""
    v = value(base)
    work = _grouped(rw, base)
    kept = _like(rw, value(work), torch.uint8)
    if _COMPUTED_IN[v.dtype] is not v.dtype:
        rw.label = ""
        wide = rw.scratch(_like(rw, value(work), _COMPUTED_IN[v.dtype]))
        rw.label = base.name + PACKING
        rw.call(aten.copy_.default, wide, work)
        work = wide
    rw.label = base.name + PACKING
    low = rw.call(aten.amin.default, work, [1], True)
    step = rw.call(aten.amax.default, work, [1], True)
    rw.call(aten.sub_.Tensor, step, low)
    rw.call(aten.div_.Scalar, step, _STEPS)
    # Never 0, since equal elements are divided by it; a nan stays a nan.
    rw.call(aten.clamp_min_.default, step, torch.finfo(value(work).dtype).tiny)
    rw.call(aten.sub_.Tensor, work, low)
    rw.call(aten.div_.Tensor, work, step)
    rw.call(aten.round_.default, work)
    rw.label = ""
    codes = rw.scratch(kept)
    rw.label = base.name + PACKED + "codes"
    rw.call(aten.copy_.default, codes, work)
    return codes, low, step


def _decoded(rw: Rewriter, codes: fx.Node, low: fx.Node, step: fx.Node, like: torch.Tensor) -> fx.Node:
    """Return the tensor, up to the error, in memory of its own with the same layout."""
    rw.label = ""
    made = rw.scratch(like)
    work = _grouped(rw, made)
    narrow = None
    if _COMPUTED_IN[like.dtype] is not like.dtype:
        rw.label = ""
        narrow, work = work, rw.scratch(_like(rw, value(codes), _COMPUTED_IN[like.dtype]))
    rw.label = rw.node.name + UNPACKED + "codes"
    rw.call(aten.copy_.default, work, codes)
    rw.label = rw.node.name + UNPACKING
    rw.call(aten.mul_.Tensor, work, step)
    rw.call(aten.add_.Tensor, work, low)
    if narrow is not None:
        rw.call(aten.copy_.default, narrow, work)
    return made


def _grouped(rw: Rewriter, tensor: fx.Node) -> fx.Node:
    """Return the elements of a dense tensor in the order of its bytes, one row for each group."""
    v = value(tensor)
    size = group_of(v.numel())
    rw.label = f"{rw.node.name}_groups"
    return rw.call(aten.as_strided.default, tensor, [v.numel() // size, size], [size, 1], v.storage_offset())


def _like(rw: Rewriter, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised fake tensor of this shape and dtype, for its layout only."""
    with rw.mode:
        return torch.empty(tensor.shape, dtype=dtype, device=tensor.device)
