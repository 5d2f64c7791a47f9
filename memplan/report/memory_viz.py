"""Renders a picture as a snapshot for PyTorch's memory_viz (https://docs.pytorch.org/memory_viz).

It reads pickles only, in the layout of `torch.cuda.memory._snapshot()`: memplan writes pickles of plain data.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from memplan.report.picture import Picture, PictureBlock
from memplan.report.sections import op_name, origin

_BASE = 0x7F00_0000_0000  # the address of the arena in memory_viz, chosen freely
_STEP_US = 10


def snapshot_bytes(picture: Picture) -> bytes:
    """Return the snapshot as a pickle (protocol 4) of plain dictionaries, lists, texts and numbers."""
    return pickle.dumps(snapshot(picture), protocol=4)


def snapshot(picture: Picture) -> dict[str, Any]:
    """Return the arena as one segment, empty after the step, and every buffer as an allocation in it."""
    block = {"address": _BASE, "size": picture.arena, "requested_size": 0, "state": "inactive", "frames": []}
    nothing = {"stream": 0, "allocated_size": 0, "active_size": 0, "requested_size": 0, "device": 0}
    segment = {
        **{"address": _BASE, "total_size": picture.arena, "segment_type": "large", "segment_pool_id": (0, 0)},
        **{**nothing, "is_expandable": False, "frames": [], "blocks": [block] if picture.arena else []},
    }
    return {"segments": [segment], "device_traces": [list(_events(picture))], "external_annotations": []}


def _events(picture: Picture) -> Iterator[dict[str, Any]]:
    yield {"action": "segment_alloc", "addr": _BASE, "size": picture.arena, "stream": 0, "frames": [], "time_us": 0}
    changes: list[tuple[int, int, int, PictureBlock]] = []
    for number, block in enumerate(picture.blocks):
        for segment in block.segments:
            changes.append((segment.start, 1, number, block))
            changes.append((segment.end, 0, number, block))  # within a step, buffers are freed before others begin
    for step, birth, _, block in sorted(changes, key=lambda change: change[:3]):
        where = {"addr": _BASE + block.offset, "size": block.holder.size, "stream": 0}
        for action in ("alloc",) if birth else ("free_requested", "free_completed"):
            yield {"action": action, **where, "frames": _frames(block), "time_us": _STEP_US * (step + 1)}


def _frames(block: PictureBlock) -> list[dict[str, Any]]:
    """Return the stack frames by which the viewer groups: op and module inside, the user's line outside."""
    h = block.holder
    file, _, line = h.source.rpartition(":")
    number = int(line) if file and line.isascii() and line.isdigit() and len(line) < 10 else 0
    frames = [{"name": f"{op_name(h.op) or h.id} -> {h.id}", "filename": origin(h), "line": 0}]
    return frames + ([{"name": h.module or "model", "filename": file, "line": number}] if file else [])
