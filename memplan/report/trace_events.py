"""A plan as Chrome trace events, for Perfetto (ui.perfetto.dev) and chrome://tracing.

One step is one microsecond: the plan knows an order, not durations.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan.report.lines import op_name, origin
from memplan.report.picture import Picture

_OPS, _BUFFERS = 1, 2


def trace_events(picture: Picture) -> dict[str, Any]:
    """The trace's JSON: ops on one track, every buffer as a slice of its lifetime, live bytes as a counter."""
    return {
        "displayTimeUnit": "ns",
        "otherData": {"title": picture.title, "unit": "1 us = 1 step", "arena": picture.arena},
        "traceEvents": [*_names(picture), *_ops(picture), *_live(picture), *_buffers(picture)],
    }


def _names(picture: Picture) -> Iterator[dict[str, Any]]:
    for pid, name in ((_OPS, picture.title), (_BUFFERS, f"arena of {picture.arena:,} bytes")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "thread_name", "pid": _OPS, "tid": 1, "args": {"name": "ops"}}


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
    for step, live in picture.profile:
        yield {"ph": "C", "name": "live bytes", "pid": _OPS, "ts": step, "args": {"bytes": live}}


def _buffers(picture: Picture) -> Iterator[dict[str, Any]]:
    for number, block in enumerate(picture.blocks):
        h = block.holder
        common = {"cat": h.kind or "buffer", "name": f"{origin(h)} {h.size:,} B", "pid": _BUFFERS, "tid": 1}
        args = {"id": h.id, "bytes": h.size, "offset": block.offset, "op": h.op, "source": h.source}
        for part, segment in enumerate(block.segments):
            name = f"{number}.{part}"
            yield {"ph": "b", "id": name, "ts": segment.start, **common, "args": args}
            yield {"ph": "e", "id": name, "ts": segment.end, **common}
