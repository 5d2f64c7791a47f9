"""Reads what CUDA's allocator recorded (`torch.cuda.memory._snapshot()`), and finds what was allocated at its peak.

A snapshot is a pickle. It is read without making any object but dictionaries, lists, texts and numbers: a file that
asks for anything else is refused, and nothing of it runs.
"""

from __future__ import annotations

import io
import os
import pickle
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from memplan.errors import UnreadableFile

_HINT = "give a file that torch.cuda.memory._dump_snapshot wrote"
_LIBRARIES = ("site-packages", "dist-packages", f"{os.sep}lib{os.sep}python", "torch/csrc", "<")
_FREES = ("free_requested", "free")  # from then on, the bytes are not the program's

_Change = tuple[int, int, str]  # an address, the change in bytes, the source line


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocated:
    """The peak of one device (by its index) in a recording.

    `peak` are the most bytes that the program had allocated at once while events were recorded, `lines` those bytes by
    the user's source line ("" if not recorded), most first; `reserved` are the bytes that the allocator held from the
    device at the end. `events`: how many changes were recorded; 0: the file has no history, and the peak is what was
    allocated when it was taken.
    """

    file: str
    device: int
    peak: int
    reserved: int
    events: int
    lines: Mapping[str, int]


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
        data = _PlainUnpickler(io.BytesIO(Path(where).read_bytes())).load()
        segments, traces = data["segments"], data.get("device_traces") or []
        devices = {_count(segment["device"]) for segment in segments} | {i for i, t in enumerate(traces) if t}
        if not devices:
            raise ValueError("it has no segment and no event")
        found = [_device_peak(where, device, segments, traces) for device in devices]
        return max(found, key=lambda one: (one.peak, -one.device))
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=where) from error
    except Exception as error:  # what a damaged or hostile pickle raises is not limited
        text = f"it has no {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"
        raise UnreadableFile(f"is no snapshot: {text.splitlines()[0][:200]}", where=where, hint=_HINT) from error


def _device_peak(where: str, device: int, segments: Iterable[Mapping[str, Any]], traces: list[Any]) -> Allocated:
    """Return the peak of a device: what is allocated at the end, followed back through the events to the beginning."""
    own = [segment for segment in segments if segment["device"] == device]
    events = list(_changes(traces[device])) if device < len(traces) else []
    now = dict(_active(own))
    for address, change, source in reversed(events):  # to what was allocated before the first event
        if change > 0:
            now.pop(address, None)
        else:
            now[address] = (-change, source)
    live = peak = sum(size for size, _ in now.values())
    reserved, at_peak = sum(_count(segment["total_size"]) for segment in own), 0
    for number, (_, change, _) in enumerate(events, 1):
        live += change
        if live > peak:
            peak, at_peak = live, number
    for address, change, source in events[:at_peak]:
        if change > 0:
            now[address] = (change, source)
        else:
            now.pop(address, None)
    found: Counter[str] = Counter()
    for size, source in now.values():
        found[source] += size
    lines = dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
    return Allocated(file=where, device=device, peak=peak, reserved=reserved, events=len(events), lines=lines)


def _active(segments: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, tuple[int, str]]]:
    """Yield the address, the bytes and the source of each block that is allocated when the snapshot is taken."""
    for segment in segments:
        address = _count(segment.get("address", 0))
        for block in segment["blocks"]:
            size = _count(block["size"])
            if block["state"] == "active_allocated":
                yield _count(block.get("address", address)), (size, _source(block.get("frames") or ()))
            address += size


def _changes(trace: Iterable[Mapping[str, Any]]) -> Iterator[_Change]:
    """Yield each allocation and free."""
    for event in trace:
        if event["action"] == "alloc" or event["action"] in _FREES:
            address, size = _count(event["addr"]), _count(event["size"])
            yield address, size if event["action"] == "alloc" else -size, _source(event.get("frames") or ())


def _source(frames: Iterable[Mapping[str, Any]]) -> str:
    """Return the innermost line that is in no library, as "model.py:12"; "" if there is none."""
    for frame in frames:
        file, line = str(frame["filename"]), _count(frame["line"])
        if file.endswith(".py") and not any(part in file for part in _LIBRARIES):
            return f"{os.path.basename(file)}:{line}"
    return ""


def _count(value: Any) -> int:
    """Return a number of bytes, an address or a line. Raises `ValueError` for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no number of bytes, address or line")
    return value
