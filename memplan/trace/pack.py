"""Masks that wait for the backward, a bit for each element instead of a byte.

After its last use in the forward a boolean tensor is packed, and before its first in the backward unpacked into memory
of its own: the same bits, so there is nothing to lose. Eight bytes of 0 or 1 are one 64-bit integer, in which a product
brings the eight bits together (and, unpacking, a product spreads them), so that each pass is one kernel over words, in
place in the mask's own bytes. Little-endian machines only, as all that torch runs on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memplan.evict.packed import PACKED, PACKING, UNPACKED, UNPACKING
from memplan.trace.returns import is_backward
from memplan.trace.rewrite import Rewriter, aten, fake_mode_of, storage_key, value
from memplan.trace.rows import VIEWS

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: byte i becomes bit 56 + i
_SPREAD = 0x0101010101010101  # times a byte: the byte eight times
_PICK = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x7F7F7F7F7F7F7F7F  # added to a byte that is not 0 and has one bit: sets its bit 7
_WORD = 8


def pack_masks(graph: fx.Graph) -> None:
    """Pack every mask that the backward needs, in place. It must be the forward's own: made by an op, and neither
    returned nor written by anything else."""
    mode = fake_mode_of(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    aliases: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), torch.Tensor):
            aliases.setdefault(storage_key(value(node)), []).append(node)
    for group in list(aliases.values()):
        if _can_pack(group):
            _pack(graph, mode, group, place)


def _can_pack(group: list[fx.Node]) -> bool:
    mask = group[0]
    v = value(mask)
    if mask.op != "call_function" or is_backward(mask) or v.dtype is not torch.bool or not v.is_contiguous():
        return False
    if v.numel() % _WORD or not v.numel() or v.storage_offset():
        return False
    users = [user for node in group for user in node.users]
    plain = all(node.target in VIEWS for node in group[1:]) and all(_only_reads(user) for user in users)
    return plain and any(is_backward(user) and user not in group for user in users)


def _only_reads(user: fx.Node) -> bool:
    schema = getattr(user.target, "_schema", None)
    return user.op == "call_function" and schema is not None and not schema.is_mutable


def _pack(graph: fx.Graph, mode: Any, group: list[fx.Node], place: dict[fx.Node, int]) -> None:
    mask = group[0]
    forward = [n for node in group for n in (node, *node.users) if not is_backward(n)]
    later = [n for node in group for n in node.users if is_backward(n) and n not in group]
    last, first = max(forward, key=place.__getitem__), min(later, key=place.__getitem__)
    if place[first] < place[last]:
        return
    following: fx.Node = last.next
    while following.op == "placeholder":
        following = following.next
    packed = _gathered(Rewriter(graph, mode, mask, before=following), mask)
    rw = Rewriter(graph, mode, mask, before=first)
    rw.phase = "is_backward"
    back = {mask: _spread(rw, packed, value(mask))}
    for view in group[1:]:
        if any(user in later for user in view.users) or is_backward(view):
            rw.label = f"{view.name}_again"
            args = (back[_source(view)], *view.args[1:]) if _source(view) in back else view.args
            back[view] = rw.call(view.target, *args)
    for node, new in back.items():
        for user in list(node.users):
            if user in later:
                user.replace_input_with(node, new)
    for view in reversed(group[1:]):
        if is_backward(view) and not view.users:
            graph.erase_node(view)


def _source(view: fx.Node) -> fx.Node:
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source


def _gathered(rw: Rewriter, mask: fx.Node) -> fx.Node:
    """The packed bits; the mask's own bytes hold nothing after it."""
    v = value(mask)
    words = _words(rw, mask, v.numel())
    rw.label = mask.name + PACKING
    rw.call(aten.mul_.Tensor, words, _GATHER)
    rw.call(aten.bitwise_right_shift_.Tensor_Scalar, words, 56)
    with rw.mode:
        like = torch.empty(v.numel() // _WORD, dtype=torch.uint8, device=v.device)
    rw.label = ""
    bits = rw.scratch(like)
    rw.label = mask.name + PACKED
    rw.call(aten.copy_.default, bits, words)
    return bits


def _spread(rw: Rewriter, bits: fx.Node, like: torch.Tensor) -> fx.Node:
    """The mask again, in memory of its own."""
    made = rw.scratch(like)
    words = _words(rw, made, like.numel())
    rw.label = rw.node.name + UNPACKED
    rw.call(aten.copy_.default, words, bits)
    rw.label = rw.node.name + UNPACKING
    for target, number in _steps():
        rw.call(target, words, number)
    rw.label = ""
    return made


def _steps() -> Iterator[tuple[Any, int]]:
    yield aten.mul_.Tensor, _SPREAD
    yield aten.bitwise_and_.Scalar, _PICK
    yield aten.add_.Tensor, _CARRY
    yield aten.bitwise_right_shift_.Tensor_Scalar, 7
    yield aten.bitwise_and_.Scalar, _SPREAD


def _words(rw: Rewriter, mask: fx.Node, count: int) -> fx.Node:
    return rw.call(aten.view.dtype, rw.call(aten.view.default, mask, [count]), torch.int64)
