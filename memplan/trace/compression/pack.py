"""Pack masks that are saved for the backward: one bit for each element instead of one byte.

A boolean tensor is packed after its last use in the forward, and unpacked into new memory before its first use in the
backward. The bits are the same, so nothing is lost. Eight bytes of 0 or 1 are one 64-bit integer. One multiplication
gathers its eight bits into a byte, and another spreads them when unpacking, so that each pass is one kernel over words,
in place in the mask's own bytes. This needs a little-endian machine, as all that torch runs on are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from memplan.core.compressed_storages import PACKED, PACKING, UNPACKED, UNPACKING
from memplan.trace.chunking.rows import VIEWS
from memplan.trace.compression.saved_for_backward import SavedStorage, saved_storages
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, fake_mode_of, value

_GATHER = 0x0102040810204080  # multiplies eight bytes of 0 or 1: byte i becomes bit 56 + i
_REPEAT_BYTE = 0x0101010101010101  # multiplies a byte: repeats it eight times
_PICK = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_CARRY = 0x7F7F7F7F7F7F7F7F  # added to a byte that is not 0 and has one bit: sets its bit 7
_WORD = 8


def pack_masks(graph: fx.Graph) -> None:
    """Pack every mask that is only saved for the backward, in place."""
    mode = fake_mode_of(graph)
    for saved in saved_storages(graph):
        if _can_pack(saved):
            _pack(graph, mode, saved)


def _can_pack(saved: SavedStorage) -> bool:
    """Return whether a saved storage is a mask that whole words can hold, and whose aliases are views by rows."""
    v = value(saved.base)
    if v.dtype is not torch.bool or not v.is_contiguous() or v.storage_offset():
        return False
    return v.numel() % _WORD == 0 and v.numel() > 0 and all(view.target in VIEWS for view in saved.aliases[1:])


def _pack(graph: fx.Graph, mode: Any, saved: SavedStorage) -> None:
    """Pack one mask, and let the backward read the unpacked one."""
    mask, views = saved.base, saved.aliases[1:]
    packed = _pack_bits(Rewriter(graph, mode, mask, before=saved.following), mask)
    rw = Rewriter(graph, mode, mask, before=saved.before)
    rw.phase = "is_backward"
    back = {mask: _unpack(rw, packed, value(mask))}
    for view in views:
        if any(user in saved.later for user in view.users) or is_backward(view):
            rw.label = f"{view.name}_again"
            args = (back[_source(view)], *view.args[1:]) if _source(view) in back else view.args
            back[view] = rw.call(view.target, *args)
    for node, new in back.items():
        for user in list(node.users):
            if user in saved.later:
                user.replace_input_with(node, new)
    for view in reversed(views):
        if is_backward(view) and not view.users:
            graph.erase_node(view)


def _source(view: fx.Node) -> fx.Node:
    """Return the tensor that a view is of."""
    source = view.args[0]
    assert isinstance(source, fx.Node)
    return source


def _pack_bits(rw: Rewriter, mask: fx.Node) -> fx.Node:
    """Return the packed bits; the mask's own bytes are overwritten."""
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


def _unpack(rw: Rewriter, bits: fx.Node, like: torch.Tensor) -> fx.Node:
    """Return the unpacked mask, in memory of its own."""
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
    """Yield the in-place ops, with their operand, that spread each byte's bits over eight bytes."""
    yield aten.mul_.Tensor, _REPEAT_BYTE
    yield aten.bitwise_and_.Scalar, _PICK
    yield aten.add_.Tensor, _CARRY
    yield aten.bitwise_right_shift_.Tensor_Scalar, 7
    yield aten.bitwise_and_.Scalar, _REPEAT_BYTE


def _words(rw: Rewriter, mask: fx.Node, count: int) -> fx.Node:
    """Return a mask viewed as 64-bit integers."""
    return rw.call(aten.view.dtype, rw.call(aten.view.default, mask, [count]), torch.int64)
