"""Renders a picture for two viewers: trace events for Perfetto, a snapshot for PyTorch's memory_viz.

Perfetto (ui.perfetto.dev) and chrome://tracing read Chrome trace events; one step is one microsecond, because a plan
has an order but no durations. memory_viz (https://docs.pytorch.org/memory_viz) reads pickles only, in the layout of
`torch.cuda.memory._snapshot()`: memplan writes pickles of plain data.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

from memplan.report.picture import Picture, PictureBlock
from memplan.report.sections import op_name, origin

_OPS, _BUFFERS, _COPIES = 1, 2, 3
_BASE = 0x7F00_0000_0000  # the address of the arena in memory_viz, chosen freely
_STEP_US = 10


def trace_events(picture: Picture) -> dict[str, Any]:
    """Return the content of the trace's JSON.

    Ops are on one track, live bytes are a counter (gathered parameters another), every buffer is a slice of its
    lifetime. Copies between device and host have tracks of their own, and last from their start to the end of the
    step's wait.
    """
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": picture.title, "unit": "1 us = 1 step", "arena": picture.arena},
        "traceEvents": [*_ops(picture), *_buffers(picture), *_copies(picture)],
    }


def trace_json(picture: Picture) -> str:
    """Return the trace as the text of its file."""
    return json.dumps(trace_events(picture), separators=(",", ":"), allow_nan=False) + "\n"


def _ops(picture: Picture) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _OPS, 0, picture.title)
    yield _name("thread_name", _OPS, 1, "ops")
    for op in picture.ops:
        args = {"step": op.step, "name": op.name, "module": op.module, "source": op.source}
        yield {"name": op_name(op.target), "cat": op.phase, "args": args, **_slice(_OPS, 1, op.step, op.step + 1)}
    for name, profile in (("live bytes", picture.profile), ("gathered bytes", picture.gathered)):
        for step, nbytes in profile:
            yield {"ph": "C", "name": name, "pid": _OPS, "tid": 0, "ts": step, "args": {"bytes": nbytes}}


def _buffers(picture: Picture) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _BUFFERS, 0, f"arena of {picture.arena:,} bytes")
    for number, block in enumerate(picture.blocks):
        h = block.holder
        common = {"cat": h.kind or "buffer", "name": f"{origin(h)} {h.size:,} B", "pid": _BUFFERS, "tid": 1}
        args = {"id": h.id, "bytes": h.size, "offset": block.offset, "op": h.op, "source": h.source}
        for part, segment in enumerate(block.segments):
            name = f"{number}.{part}"
            yield {"ph": "b", "id": name, "ts": segment.start, **common, "args": args}
            yield {"ph": "e", "id": name, "ts": segment.end, **common}


def _copies(picture: Picture) -> Iterator[dict[str, Any]]:
    """Yield the copies on as many tracks as needed, since slices of one track must not overlap."""
    if picture.copies:
        yield _name("process_name", _COPIES, 0, "copies between device and host")
    free: list[tuple[bool, int]] = []  # for each track: its direction, and the end of its last copy
    for copy in sorted(picture.copies, key=lambda c: (c.start, c.end)):
        track = next((i for i, (way, end) in enumerate(free) if way == copy.to_host and end <= copy.start), len(free))
        if track == len(free):
            free.append((copy.to_host, copy.end))
            yield _name("thread_name", _COPIES, track + 1, "to the host" if copy.to_host else "back to the device")
        free[track] = copy.to_host, copy.end
        name, kind = f"{copy.module or copy.storage} {copy.nbytes:,} B", "offload" if copy.to_host else "reload"
        args = {"storage": copy.storage, "bytes": copy.nbytes}
        yield {"name": name, "cat": kind, "args": args, **_slice(_COPIES, track + 1, copy.start, copy.end)}


def _slice(pid: int, tid: int, start: int, end: int) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": start, "dur": end - start}


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}


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
