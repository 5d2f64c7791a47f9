"""Renders a plan as a snapshot of PyTorch's caching allocator, for https://docs.pytorch.org/memory_viz.

The viewer shows the arena as one segment and every buffer as an allocation in it. Pickle is the only format that it
reads; memplan writes pickles and never reads one.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import Any

from memplan.report.lines import op_name, origin
from memplan.report.picture import Picture, PictureBlock

_BASE = 0x7F00_0000_0000  # the address of the arena in the viewer, chosen freely
_STEP_US = 10


def snapshot_bytes(picture: Picture) -> bytes:
    """Return the snapshot as a pickle (protocol 4) of plain dictionaries, lists, texts and numbers."""
    return pickle.dumps(snapshot(picture), protocol=4)


def snapshot(picture: Picture) -> dict[str, Any]:
    """Return the snapshot in the layout of `torch.cuda.memory._snapshot()`: one segment, and its events."""
    return {"segments": [_segment(picture)], "device_traces": [list(_events(picture))], "external_annotations": []}


def _segment(picture: Picture) -> dict[str, Any]:
    """Return the arena as a segment in its state after the step: empty."""
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
            changes.append((segment.end, 0, number, block))  # within a step, buffers are freed before others begin
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
    """Return the stack frames by which the viewer groups: op and module inside, the user's line outside."""
    h = block.holder
    file, _, line = h.source.rpartition(":")
    number = int(line) if file and line.isascii() and line.isdigit() and len(line) < 10 else 0
    frames = [{"name": f"{op_name(h.op) or h.id} -> {h.id}", "filename": origin(h), "line": 0}]
    if file:
        frames.append({"name": h.module or "model", "filename": file, "line": number})
    return frames
