"""Measures the bytes that kernels allocate by themselves, which fake tensors cannot show.

The step runs once more, op by op, under torch's profiler, which records every allocation on the device. Torch has one
such profiler: where the user's program runs under it, nothing is measured.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch.autograd.profiler import record_function

from memplan.devices.kinds import allocations_of

_THUNK = "memplan::"


def can_measure() -> bool:
    """Return whether `peak_bytes` can be measured now: not while the user's profiler records."""
    return not torch.autograd.profiler._is_profiler_enabled


def peak_bytes(thunks: Sequence[Callable[[], None]], device: torch.device) -> list[int]:
    """Return for each thunk the most bytes (above those at its start) that were allocated while it ran.

    Python's garbage collector is paused: tensors of others that it would free meanwhile would count as freed here.
    Raises `RuntimeError` unless `can_measure`.
    """
    if not can_measure():
        raise RuntimeError("another profiler records")
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
