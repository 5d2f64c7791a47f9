"""A plan as a snapshot of PyTorch's caching allocator, for https://docs.pytorch.org/memory_viz.

The picture there is of the plan, as if the arena were one segment and every buffer an allocation in it. Pickle is
the only format that the viewer reads; memplan writes it and never reads it.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from memplan.report.lines import op_name, origin
from memplan.report.picture import Picture, PictureBlock

_BASE = 0x7F00_0000_0000  # where the arena stands: any address will do
_STEP_US = 10


def snapshot_bytes(picture: Picture) -> bytes:
    """The pickle, protocol 4, of plain dictionaries, lists, texts and numbers."""
    return pickle.dumps(snapshot(picture), protocol=4)


def snapshot(picture: Picture) -> dict[str, Any]:
    """`torch.cuda.memory._snapshot()`'s layout: one segment, and an event per birth and death."""
    return {"segments": [_segment(picture)], "device_traces": [list(_events(picture))], "external_annotations": []}


def _segment(picture: Picture) -> dict[str, Any]:
    """The arena after the step: empty."""
    block = {"address": _BASE, "size": picture.arena, "requested_size": 0, "state": "inactive", "frames": []}
    return {
        "address": _BASE,
        "total_size": picture.arena,
        "stream": 0,
        "segment_type": "large",
        "segment_pool_id": (0, 0),
        "allocated_size": 0,
        "active_size": 0,
        "requested_size": 0,
        "device": 0,
        "is_expandable": False,
        "frames": [],
        "blocks": [block] if picture.arena else [],
    }


def _events(picture: Picture) -> Iterator[dict[str, Any]]:
    yield {"action": "segment_alloc", "addr": _BASE, "size": picture.arena, "stream": 0, "frames": [], "time_us": 0}
    changes: list[tuple[int, int, int, PictureBlock]] = []
    for number, block in enumerate(picture.blocks):
        for segment in block.segments:
            changes.append((segment.start, 1, number, block))
            changes.append((segment.end, 0, number, block))  # deaths come first within a step
    for step, birth, _, block in sorted(changes, key=lambda change: change[:3]):
        common = {
            "addr": _BASE + block.offset,
            "size": block.holder.size,
            "stream": 0,
            "frames": _frames(block),
            "time_us": _STEP_US * (step + 1),
        }
        for action in ("alloc",) if birth else ("free_requested", "free_completed"):
            yield {"action": action, **common}


def _frames(block: PictureBlock) -> list[dict[str, Any]]:
    """The viewer groups by frames: the op and the module are the inner one, the user's line the outer one."""
    h = block.holder
    file, _, line = h.source.rpartition(":")
    number = int(line) if file and line.isascii() and line.isdigit() and len(line) < 10 else 0
    frames = [{"name": f"{op_name(h.op) or h.id} -> {h.id}", "filename": origin(h), "line": 0}]
    if file:
        frames.append({"name": h.module or "model", "filename": file, "line": number})
    return frames
