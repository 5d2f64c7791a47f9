"""Measures the bytes that kernels allocate by themselves, which fake tensors cannot show.

The step runs once more, op by op, under torch's profiler, which records every allocation on the device. Torch has one
such profiler. Where the user's program runs under it, the older one records the CPU, in a thread of its own.
"""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import ProfilerConfig, ProfilerState  # type: ignore[attr-defined]
from torch.autograd.profiler import record_function

from memplan.devices.kinds import allocations_of, is_accelerator

_THUNK = "memplan::"


def can_measure(device: torch.device) -> bool:
    """Return whether `peak_bytes` can be measured now: on an accelerator, not while the user's profiler records."""
    return not (torch.autograd.profiler._is_profiler_enabled and is_accelerator(device))


def peak_bytes(thunks: Sequence[Callable[[], None]], device: torch.device) -> list[int]:
    """Return for each thunk the most bytes (above those at its start) that were allocated while it ran.

    Python's garbage collector is paused: tensors of others that it would free meanwhile would count as freed here.
    While the user's profiler records, thunks run in another thread, without autograd. Raises `RuntimeError` unless
    `can_measure`.
    """
    if not can_measure(device):
        raise RuntimeError("another profiler records on the device")
    if torch.autograd.profiler._is_profiler_enabled:
        with garbage_kept():
            return _peaks_apart(thunks)
    with quiet_kineto(), garbage_kept(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        for i, thunk in enumerate(thunks):
            with record_function(f"{_THUNK}{i}"):
                thunk()
    kineto = allocations_of(device)
    windows: dict[int, tuple[int, int]] = {}
    allocations: list[tuple[int, int]] = []
    for event in profiler.kineto_results.events():
        name = event.name()
        if name.startswith(_THUNK) and event.device_type() == torch.profiler.DeviceType.CPU:
            windows[int(name.removeprefix(_THUNK))] = (event.start_ns(), event.start_ns() + event.duration_ns())
        elif name == "[memory]" and event.device_type() == kineto:
            allocations.append((event.start_ns(), event.nbytes()))
    allocations.sort()
    return list(_peaks(windows, allocations, len(thunks)))


def _peaks(windows: dict[int, tuple[int, int]], allocations: list[tuple[int, int]], count: int) -> Iterator[int]:
    at = 0
    for i in range(count):
        start, end = windows[i]
        while at < len(allocations) and allocations[at][0] < start:
            at += 1
        now = peak = 0
        while at < len(allocations) and allocations[at][0] <= end:
            now += allocations[at][1]
            peak = max(peak, now)
            at += 1
        yield peak


def _peaks_apart(thunks: Sequence[Callable[[], None]]) -> list[int]:
    """Return what `peak_bytes` does for thunks on the CPU, which run in a thread of their own."""
    config = ProfilerConfig(
        ProfilerState.CPU, False, True, False, False, False, torch._C._profiler._ExperimentalConfig()
    )
    found: list[int] = [0] * len(thunks)
    errors: list[BaseException] = []

    def run() -> None:
        """Run the thunks, and read off the events what each has allocated."""
        try:
            torch._C._autograd._enable_profiler_legacy(config)
            try:
                with torch.no_grad():
                    for i, thunk in enumerate(thunks):
                        with record_function(f"{_THUNK}{i}"):
                            thunk()
            finally:
                for events in torch._C._autograd._disable_profiler_legacy():
                    _read_peaks(events, found)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="memplan measures kernels")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found


def _read_peaks(events: Iterable[Any], found: list[int]) -> None:
    """Put into `found` the most bytes of each thunk among the events of one thread, which are in order."""
    running: list[str] = []
    now, thunk = 0, -1
    for event in events:
        kind = event.kind()
        if kind == "push":
            running.append(event.name())
            if running[-1].startswith(_THUNK):
                now, thunk = 0, int(running[-1].removeprefix(_THUNK))
        elif kind == "pop" and running and running.pop().startswith(_THUNK):
            thunk = -1
        elif kind == "memory_alloc" and thunk >= 0:
            now += event.cpu_memory_usage()
            found[thunk] = max(found[thunk], now)


@contextmanager
def garbage_kept() -> Iterator[None]:
    """Pause Python's garbage collector."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def quiet_kineto() -> Iterator[None]:
    """Keep Kineto from reporting its start and stop on stderr; the setting is read when it starts."""
    before = os.environ.get("KINETO_LOG_LEVEL")
    os.environ["KINETO_LOG_LEVEL"] = "99"
    try:
        yield
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]
        else:
            os.environ["KINETO_LOG_LEVEL"] = before
