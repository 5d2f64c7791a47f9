"""Reads what CUDA's allocator recorded (`torch.cuda.memory._snapshot()`), and finds what was allocated at its peak.

`Allocated` is what files of torch's profiler are read into too (`memplan/analysis/profiled.py`).

A snapshot is a pickle. It is read without making any object but dictionaries, lists, texts and numbers: a file that
asks for anything else is refused, and nothing of it runs.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from memplan.errors import UnreadableFile

_HINT = "give a file that torch.cuda.memory._dump_snapshot wrote"
LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "torch/csrc", "<")
_FREES = ("free_requested", "free")  # from then on, the bytes are not the program's


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocatedBlock:
    """An allocation that is alive at the peak: its bytes, and the user's line that made it ("" if not recorded)."""

    nbytes: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The peak of one device in a recording.

    `device` is its index; None where the file does not name it. `peak` are the most bytes that the program had
    allocated at once while events were recorded, `reserved` those that the allocator held from the device at the end
    (None: not recorded). `events`: how many changes were recorded; 0: the file has no history, and the peak is what was
    allocated when it was taken.

    What is alive at the peak are `blocks`, or `kinds`, bytes by the profiler's category, where it has no blocks.
    `functions`: the sources are first lines of functions, which are these; else they are the lines that allocate.
    """

    file: str
    device: int | None
    peak: int
    reserved: int | None
    events: int
    blocks: tuple[AllocatedBlock, ...] = ()
    kinds: Mapping[str, int] = field(default_factory=dict)
    functions: tuple[str, ...] = ()

    def by_source(self) -> dict[str, int]:
        """Return the bytes at the peak by source line, most first."""
        found: Counter[str] = Counter()
        for block in self.blocks:
            found[block.source] += block.nbytes
        return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))


class _PlainUnpickler(pickle.Unpickler):
    """Loads containers, texts and numbers; refuses everything that names code."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, and a snapshot holds plain data only")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to data outside of the file")


def read_snapshot(path: str | os.PathLike[str]) -> Allocated:
    """Return the peak that a snapshot shows; of several devices, that with the highest.

    Raises `UnreadableFile` for a file that cannot be read, is no snapshot, or holds anything but plain data.
    """
    where = os.fspath(path)
    try:
        content = Path(where).read_bytes()
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=where) from error
    try:
        data = _PlainUnpickler(io.BytesIO(content)).load()
    except Exception as error:  # what a damaged or hostile pickle raises is not limited
        text = f"{error}".splitlines()[0][:200] if str(error) else type(error).__name__
        raise UnreadableFile(f"is no snapshot: {text}", where=where, hint=_HINT) from error
    try:
        return _peak_of(data, where)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        what = f"is no snapshot: {told(error)}"[:300]
        raise UnreadableFile(what, where=where, hint=_HINT) from error


def told(error: Exception) -> str:
    """Return what was found wrong with data in a file, in words."""
    return f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _peak_of(data: Any, where: str) -> Allocated:
    segments, traces = data["segments"], data.get("device_traces") or []
    devices = sorted({count(segment["device"]) for segment in segments} | {i for i, t in enumerate(traces) if t})
    if not devices:
        raise ValueError("it has no segment and no event")
    found = []
    for device in devices:
        own = [segment for segment in segments if segment["device"] == device]
        events = list(_changes(traces[device])) if device < len(traces) else []
        found.append(_device_peak(where, device, own, events))
    return max(found, key=lambda one: (one.peak, -(one.device or 0)))


def _device_peak(
    where: str, device: int, segments: list[Mapping[str, Any]], events: list[tuple[int, int, str]]
) -> Allocated:
    """Return the peak of a device: what is allocated at the end, followed back through the events to the beginning."""
    peak, blocks = replayed(dict(_active(segments)), events)
    reserved = sum(count(segment["total_size"]) for segment in segments)
    return Allocated(file=where, device=device, peak=peak, reserved=reserved, events=len(events), blocks=blocks)


def replayed(
    end: Mapping[int, tuple[int, str]], events: list[tuple[int, int, str]], before: int = 0
) -> tuple[int, tuple[AllocatedBlock, ...]]:
    """Return the peak, bytes, and what is alive at it.

    `end` is what is allocated after the last event: bytes and source by address. Each event is an address, the change
    in bytes, and the source. `before` are bytes known to be allocated before the first event, some of which may be
    freed by the events.
    """
    now = dict(end)
    for address, change, source in reversed(events):  # to what was allocated before the first event
        if change > 0:
            now.pop(address, None)
        else:
            now[address] = (-change, source)
    unseen = max(before - sum(size for size, _ in now.values()), 0)
    live = peak = unseen + sum(size for size, _ in now.values())
    at_peak = 0
    for number, (_, change, _) in enumerate(events, 1):
        live += change
        if live > peak:
            peak, at_peak = live, number
    for address, change, source in events[:at_peak]:
        if change > 0:
            now[address] = (change, source)
        else:
            now.pop(address, None)
    blocks = [AllocatedBlock(nbytes=size, source=source) for size, source in now.values()]
    return peak, (*blocks, *([AllocatedBlock(nbytes=unseen, source="")] if unseen else []))


def _active(segments: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the address, the bytes and the source of each block that is allocated when the snapshot is taken."""
    for segment in segments:
        address = count(segment.get("address", 0))
        for block in segment["blocks"]:
            size = count(block["size"])
            if block["state"] == "active_allocated":
                yield count(block.get("address", address)), (size, _source(block.get("frames") or ()))
            address += size


def _changes(trace: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, int, str]]:
    """Yield the address, the change in bytes and the source of each allocation and free."""
    for event in trace:
        if event["action"] == "alloc":
            yield count(event["addr"]), count(event["size"]), _source(event.get("frames") or ())
        elif event["action"] in _FREES:
            yield count(event["addr"]), -count(event["size"]), _source(event.get("frames") or ())


def _source(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line that is in no library, as "model.py:12"; "" if there is none."""
    for frame in frames:
        file, line = str(frame["filename"]), count(frame["line"])
        if file.endswith(".py") and not any(part in file for part in LIBRARIES):
            return f"{os.path.basename(file)}:{line}"
    return ""


def count(value: Any) -> int:
    """Return a number of bytes, an address or a line. Raises `ValueError` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes, address or line")
    return value
