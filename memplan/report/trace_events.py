"""Renders a plan as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One step is one microsecond, because a plan has an order but no durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan.report.lines import op_name, origin
from memplan.report.picture import Picture

_OPS, _BUFFERS, _COPIES = 1, 2, 3


def trace_events(picture: Picture) -> dict[str, Any]:
    """Return the content of the trace's JSON.

    Ops are on one track, live bytes are a counter (gathered parameters another), every buffer is a slice of its
    lifetime. Copies between device and host have tracks of their own, and last from their start to the end of the
    step's wait.
    """
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": picture.title, "unit": "1 us = 1 step", "arena": picture.arena},
        "traceEvents": [*_names(picture), *_ops(picture), *_live(picture), *_buffers(picture), *_copies(picture)],
    }


def _names(picture: Picture) -> Iterator[dict[str, Any]]:
    yield _name("process_name", _OPS, 0, picture.title)
    yield _name("process_name", _BUFFERS, 0, f"arena of {picture.arena:,} bytes")
    yield _name("thread_name", _OPS, 1, "ops")


def _ops(picture: Picture) -> Iterator[dict[str, Any]]:
    for op in picture.ops:
        yield {
            "ph": "X",
            "name": op_name(op.target),
            "cat": op.phase,
            "pid": _OPS,
            "tid": 1,
            "ts": op.step,
            "dur": 1,
            "args": {"step": op.step, "name": op.name, "module": op.module, "source": op.source},
        }


def _live(picture: Picture) -> Iterator[dict[str, Any]]:
    for name, profile in (("live bytes", picture.profile), ("gathered bytes", picture.gathered)):
        for step, nbytes in profile:
            yield {"ph": "C", "name": name, "pid": _OPS, "tid": 0, "ts": step, "args": {"bytes": nbytes}}


def _buffers(picture: Picture) -> Iterator[dict[str, Any]]:
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
    if not picture.copies:
        return
    yield _name("process_name", _COPIES, 0, "copies between device and host")
    free: list[tuple[bool, int]] = []  # for each track: its direction, and the end of its last copy
    for copy in sorted(picture.copies, key=lambda c: (c.start, c.end)):
        track = next((i for i, (way, end) in enumerate(free) if way == copy.to_host and end <= copy.start), len(free))
        if track == len(free):
            free.append((copy.to_host, copy.end))
            yield _name("thread_name", _COPIES, track + 1, "to the host" if copy.to_host else "back to the device")
        free[track] = copy.to_host, copy.end
        yield {
            "ph": "X",
            "name": f"{copy.module or copy.storage} {copy.nbytes:,} B",
            "cat": "offload" if copy.to_host else "reload",
            "pid": _COPIES,
            "tid": track + 1,
            "ts": copy.start,
            "dur": copy.end - copy.start,
            "args": {"storage": copy.storage, "bytes": copy.nbytes},
        }


def _name(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
