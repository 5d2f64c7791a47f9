"""Reads what torch's profiler recorded of memory, and finds what was allocated at its peak.

It writes three files: a memory timeline (`export_memory_timeline`), which has bytes by category over time; the raw one
of the same (`.raw.json.gz`), which has every change; and a trace (`export_chrome_trace`, with `profile_memory=True`),
whose events named "[memory]" have addresses, and with `with_stack=True` the functions that were running.
"""

from __future__ import annotations

import gzip
import json
import math
import os
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

from memplan.analysis.allocated import LIBRARIES, Allocated, count, replayed, told
from memplan.core.units import format_bytes
from memplan.errors import UnreadableFile

_HINT = "give a file that export_memory_timeline or export_chrome_trace (profile_memory=True) of torch.profiler wrote"
_MOST = 1 << 30  # bytes of JSON that are read; parsed, they take several times as many
_HEAD = 4096  # bytes at a file's beginning that tell what it is
_TRACE_KEYS = (b'"traceEvents"', b'"schemaVersion"', b'"traceName"', b'"deviceProperties"')
_GZIP = b"\x1f\x8b"
_FUNCTION = re.compile(r"(.+\.py)\((\d{1,9})\): ", re.DOTALL)
_CPU = 0  # c10's number of the device type

# The order of `torch.profiler._memory_profiler._CATEGORY_TO_COLORS`, by which both timelines number them.
KINDS = (
    "parameters", "optimizer state", "inputs", "temporaries", "activations", "gradients", "autograd's own", "unknown",
)  # fmt: skip
_PREEXISTING, _CREATE, _CHANGE, _DESTROY = 1, 2, 3, 4

_Event = Mapping[str, Any]


def is_profile(path: str | os.PathLike[str]) -> bool:
    """Return whether a file looks like one of the profiler's, and not like a plan; whether it is one, reading tells."""
    name = os.fspath(path)
    if name.endswith(".json.gz"):
        return True
    if not name.endswith(".json"):
        return False
    try:
        with open(name, "rb") as file:
            head = file.read(_HEAD).lstrip()
    except OSError:
        return False
    if head.startswith(b"["):
        return head[1:].lstrip().startswith(b"[")
    return b'"schema_version"' not in head and any(key in head for key in _TRACE_KEYS)


def read_profile(path: str | os.PathLike[str]) -> Allocated:
    """Return the peak that a file of the profiler shows: that of the accelerator with the highest, else of the CPU.

    Raises `UnreadableFile` for a file that cannot be read, is too large, or is none of the profiler's three.
    """
    where = os.fspath(path)
    data = _parsed(where)
    try:
        if isinstance(data, dict):
            return _of_trace(data, where)
        is_timeline = len(data) == 2 and data[1] and isinstance(data[1][0], list)
        return _of_timeline(data, where) if is_timeline else _of_changes(data, where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        what = f"is no recording of memory: {told(error)}"[:300]
        raise UnreadableFile(what, where=where, hint=_HINT) from error


def _parsed(where: str) -> Any:
    """Return the JSON of a file, which may be gzipped. Raises `UnreadableFile`."""
    try:
        with open(where, "rb") as file:
            is_packed = file.read(2) == _GZIP
            file.seek(0)
            text = cast("BinaryIO", gzip.GzipFile(fileobj=file)).read(_MOST + 1) if is_packed else file.read(_MOST + 1)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UnreadableFile(f"is a damaged gzip file: {error}", where=where, hint=_HINT) from error
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=where) from error
    if len(text) > _MOST:
        what = f"has more than {format_bytes(_MOST)} of JSON"
        raise UnreadableFile(what, where=where, hint="record fewer steps, or without record_shapes and with_stack")
    try:
        return json.loads(text)
    except RecursionError as error:
        raise UnreadableFile("is nested too deeply", where=where, hint=_HINT) from error
    except ValueError as error:
        raise UnreadableFile(f"is not JSON: {error}"[:300], where=where, hint=_HINT) from error


# -- timelines ---------------------------------------------------------------------------------------------


def _of_timeline(data: list[Any], where: str) -> Allocated:
    """Return the peak of `[times, sizes]`: each row of sizes has a zero, and the bytes of each category."""
    times, sizes = data
    if len(times) != len(sizes) or not times:
        raise ValueError(f"it has {len(times)} times and {len(sizes)} rows of sizes")
    rows = [_row(row) for row in sizes]
    highest = max(rows, key=sum)
    return Allocated(
        file=where, device=None, peak=count(sum(highest)), reserved=None, events=len(rows), kinds=_kinds(highest)
    )


def _row(row: Any) -> list[int]:
    """Return the bytes of each category. A category alone may be below zero: torch guesses which one a tensor is of."""
    if not isinstance(row, list) or len(row) != len(KINDS) + 1 or row[0] != 0:
        raise ValueError(f"a row of sizes has a zero and {len(KINDS)} categories")
    return [_whole(size) for size in row[1:]]


def _of_changes(data: list[Any], where: str) -> Allocated:
    """Return the peak of a raw timeline: `(time, action, bytes, category)` each."""
    live = [0] * len(KINDS)
    total = peak = 0
    highest = tuple(live)
    for event in data:
        if not isinstance(event, list) or len(event) != 4:
            raise ValueError("an event has a time, an action, bytes and a category")
        action, change, kind = event[1], _whole(event[2]), count(event[3])
        if action not in (_PREEXISTING, _CREATE, _CHANGE, _DESTROY):
            raise ValueError(f"{action!r} is no action")
        live[kind] += change
        total += change
        if total > peak:
            peak, highest = total, tuple(live)
    if not data:
        raise ValueError("it has no event")
    return Allocated(file=where, device=None, peak=peak, reserved=None, events=len(data), kinds=_kinds(highest))


def _kinds(sizes: Iterable[int]) -> dict[str, int]:
    return {name: size for name, size in zip(KINDS, sizes, strict=True) if size}


def _whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{value!r} is no number of bytes")
    return value


# -- traces ------------------------------------------------------------------------------------------------


def _of_trace(data: Mapping[str, Any], where: str) -> Allocated:
    """Return the peak of a trace's events of memory."""
    events = [event for event in data["traceEvents"] if isinstance(event, dict)]
    found = defaultdict[tuple[int, int], list[_Event]](list)
    for event in events:
        if event.get("name") == "[memory]":
            args = event["args"]
            found[_whole(args["Device Type"]), _whole(args["Device Id"])].append(event)
    if not found:
        raise ValueError("it has no event of memory: it was recorded without profile_memory=True")
    accelerators = [device for device in found if device[0] != _CPU]
    frames, functions = _frames(events), _functions(events)
    peaks = [_device_peak(where, device, found[device], frames, functions) for device in accelerators or found]
    return max(peaks, key=lambda one: (one.peak, -(one.device or 0)))


def _device_peak(
    where: str,
    device: tuple[int, int],
    events: list[_Event],
    frames: Mapping[tuple[Any, Any], list[_Event]],
    functions: tuple[str, ...],
) -> Allocated:
    ordered = sorted(events, key=_time)
    first, last = ordered[0]["args"], ordered[-1]["args"]
    before = max(count(first.get("Total Allocated", 0)) - _whole(first["Bytes"]), 0)
    sources = _sources(ordered, frames)
    changes = [(count(e["args"]["Addr"]), _whole(e["args"]["Bytes"]), sources[id(e)]) for e in ordered]
    peak, blocks = replayed({}, changes, before)
    return Allocated(
        file=where,
        device=None if device[0] == _CPU else device[1],
        peak=peak,
        reserved=count(last.get("Total Reserved", 0)) or None,
        events=len(changes),
        blocks=blocks,
        functions=functions,
    )


def _frames(events: Iterable[_Event]) -> dict[tuple[Any, Any], list[_Event]]:
    """Return what was running, functions and ops, by thread and by the time of its beginning; outer ones first."""
    found = defaultdict[tuple[Any, Any], list[_Event]](list)
    for event in events:
        if event.get("ph") == "X" and event.get("cat") in ("python_function", "cpu_op"):
            found[_thread(event)].append(event)
    for running in found.values():
        running.sort(key=lambda event: (_time(event), -_number(event["dur"])))
    return dict(found)


def _sources(events: Iterable[_Event], frames: Mapping[tuple[Any, Any], list[_Event]]) -> dict[int, str]:
    """Return for each event (by `id`) what was running: the user's innermost function, or the outermost op.

    `events` are sorted by time.
    """
    found, stacks = dict[int, str](), defaultdict[tuple[Any, Any], list[_Event]](list)
    started = Counter[tuple[Any, Any]]()
    for event in events:
        thread, now = _thread(event), _time(event)
        running, stack = frames.get(thread, []), stacks[thread]
        while started[thread] < len(running) and _time(running[started[thread]]) <= now:
            stack.append(running[started[thread]])
            started[thread] += 1
        while stack and _end(stack[-1]) < now:
            stack.pop()
        found[id(event)] = _source(frame for frame in stack if _end(frame) >= now)
    return found


def _source(stack: Iterable[_Event]) -> str:
    """Return the user's innermost function as "model.py:7", its first line; else the outermost op; "" if neither."""
    running = [str(frame["name"]) for frame in stack]
    function = next((name for name in map(_function, reversed(running)) if name), "")
    return function or next((name for name in running if "::" in name), "")


def _function(name: str) -> str:
    """Return "model.py:7" for "model.py(7): forward"; "" for what is no function, or a library's."""
    found = _FUNCTION.match(name)
    if found is None:
        return ""
    path, line = found.groups()
    top = Path(path).parts[0].removesuffix(".py")  # torch leaves out the folders that modules are searched in
    if top == "torch" or top in sys.stdlib_module_names or any(part in path for part in LIBRARIES):
        return ""
    return f"{os.path.basename(path)}:{int(line)}"


def _functions(events: Iterable[_Event]) -> tuple[str, ...]:
    """Return the user's functions that ran, sorted."""
    names = {str(event.get("name")) for event in events if event.get("cat") == "python_function"}
    return tuple(sorted({name for name in map(_function, names) if name}))


def functions_of(lines: Iterable[str], functions: Iterable[str]) -> Iterator[str]:
    """Yield for each line ("model.py:12") the function that holds it: the last that begins at or before it.

    A line that no function holds is yielded as it is.
    """
    begins = defaultdict[str, list[int]](list)
    for function in functions:
        file, _, first = function.rpartition(":")
        begins[file].append(int(first))
    for text in lines:
        file, _, line = text.rpartition(":")
        before = [first for first in begins.get(file, ()) if line.isdigit() and first <= int(line)]
        yield f"{file}:{max(before)}" if before else text


def _thread(event: _Event) -> tuple[Any, Any]:
    return str(event.get("pid")), str(event.get("tid"))


def _time(event: _Event) -> float:
    return _number(event["ts"])


def _end(event: _Event) -> float:
    return _number(event["ts"]) + _number(event["dur"])


def _number(value: Any) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or math.isnan(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)
