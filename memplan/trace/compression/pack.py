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

from memplan.core.compressed_storages import PACKED, PACKING, UNPACKED, UNPACKING
from memplan.trace.chunking.rows import VIEWS
from memplan.trace.compression.saved_for_backward import Wait, waits_of
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value

_GATHER = 0x0102040810204080  # times eight bytes of 0 or 1: byte i becomes bit 56 + i
_SPREAD = 0x0101010101010101  # times a byte: the byte eight times
_PICK = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x7F7F7F7F7F7F7F7F  # added to a byte that is not 0 and has one bit: sets its bit 7
_WORD = 8


def pack_masks(graph: fx.Graph) -> None:
    """Pack every mask that only waits for the backward, in place."""
    mode = fake_mode_of(graph)
    for wait in waits_of(graph):
        if _can_pack(wait):
            _pack(graph, mode, wait)


def _can_pack(wait: Wait) -> bool:
    v = value(wait.base)
    if v.dtype is not torch.bool or not v.is_contiguous() or v.storage_offset():
        return False
    return v.numel() % _WORD == 0 and v.numel() > 0 and all(view.target in VIEWS for view in wait.aliases[1:])


def _pack(graph: fx.Graph, mode: Any, wait: Wait) -> None:
    mask, views = wait.base, wait.aliases[1:]
    packed = _gathered(Rewriter(graph, mode, mask, before=wait.following), mask)
    rw = Rewriter(graph, mode, mask, before=wait.before)
    rw.phase = "is_backward"
    back = {mask: _spread(rw, packed, value(mask))}
    for view in views:
        if any(user in wait.later for user in view.users) or is_backward(view):
            rw.label = f"{view.name}_again"
            args = (back[_source(view)], *view.args[1:]) if _source(view) in back else view.args
            back[view] = rw.call(view.target, *args)
    for node, new in back.items():
        for user in list(node.users):
            if user in wait.later:
                user.replace_input_with(node, new)
    for view in reversed(views):
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
    rw.label = mask.name + PACKED + "bits"
    rw.call(aten.copy_.default, bits, words)
    return bits


def _spread(rw: Rewriter, bits: fx.Node, like: torch.Tensor) -> fx.Node:
    """The mask again, in memory of its own."""
    made = rw.scratch(like)
    words = _words(rw, made, like.numel())
    rw.label = rw.node.name + UNPACKED + "bits"
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
