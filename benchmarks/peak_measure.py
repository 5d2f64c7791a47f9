"""Measures the peak of a step from outside: by memory events, and by the resident set of the process.

    python -m benchmarks.peak_measure resident mlp memplan --size nano

Nothing here asks a contender for its own figures. `benchmarks.peak` runs each measurement in a process of its own.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils import _pytree as pytree

from benchmarks.peak_contenders import CONTENDERS, Step, limit_of
from benchmarks.results import Cell
from benchmarks.zoo import EXTRAS, ZOO

MODELS = MappingProxyType({**ZOO, **EXTRAS})
WARM_UP = 3  # steps: the first ones compile, fill caches and settle allocators
MMAP_THRESHOLD = 64 << 10  # bytes: the C allocator gives larger blocks back to the system when they are freed
RETURN_MEMORY: Mapping[str, str] = MappingProxyType(
    {"MALLOC_MMAP_THRESHOLD_": str(MMAP_THRESHOLD), "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_TOP_PAD_": "0"}
)  # of the environment in which `resident_growth` is measured
_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A change of allocated bytes: `nbytes` is negative where memory was freed; `time_ns` is the profiler's clock."""

    time_ns: int
    nbytes: int


def memory_events(run: Callable[[], object]) -> list[Event]:
    """Return the allocations and frees of the CPU's memory while `run` runs, in their order.

    The profiler does not report that memory was freed which was allocated while it was off. So run a step under it
    once before the one to be measured: whatever lives from that step to the next is known from then on.

    Args:
        run: The step.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> [event.nbytes for event in memory_events(lambda: torch.empty(16))]
        [64, -64]
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        run()
    return events_of(profiler)


def events_of(profiler: profile) -> list[Event]:
    """Return the allocations and frees that a profiler has seen, in their order.

    Args:
        profiler: A profiler that has been stopped, with `profile_memory=True`.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        ...     kept = torch.empty(16)
        >>> [event.nbytes for event in events_of(profiler)]
        [64]
    """
    found = (event for event in _recorded(profiler) if event.name() == "[memory]")
    return sorted((Event(time_ns=e.start_ns(), nbytes=e.nbytes()) for e in found), key=lambda event: event.time_ns)


def spans_of(profiler: profile, prefix: str) -> list[tuple[int, int]]:
    """Return when the functions ran whose recorded names begin with `prefix`: start and end by the profiler's clock.

    Args:
        profiler: A profiler that has been stopped.
        prefix: How the names begin, as `"Optimizer.step#"`.

    Raises:
        RuntimeError: The profiler recorded nothing.

    Example:
        >>> with profile(activities=[ProfilerActivity.CPU]) as profiler:
        ...     sum_ = torch.ones(2) + 1
        >>> len(spans_of(profiler, "aten::add"))
        1
    """
    found = (event for event in _recorded(profiler) if event.name().startswith(prefix))
    return [(event.start_ns(), event.start_ns() + event.duration_ns()) for event in found]


def _recorded(profiler: profile) -> Iterable[Any]:
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("the profiler recorded nothing")
    return profiler.profiler.kineto_results.events()


def peak_growth(step: Step) -> int:
    """Return the highest sum of bytes that the second of two steps has allocated and not yet freed."""
    for _ in range(2):
        step.clear()
        events = memory_events(step.run)
    return max(accumulate(event.nbytes for event in events), default=0)


def live_bytes() -> int:
    """Return the bytes of all storages of live tensors on the CPU; bytes that several storages share count once.

    These are parameters, buffers, inputs and gradients, what autograd has saved for a backward that is still to come,
    and whatever a contender keeps between steps, as its arena. Tensors are found by Python's garbage collector, so
    others that only C++ refers to are not seen. Storages that do not own their bytes (views of an arena by address,
    numpy's arrays) do not count: the arena may have been freed.
    """
    gc.collect()
    spans = []
    objects = gc.get_objects()
    kinds = {kind for kind in set(map(type, objects)) if issubclass(kind, torch.Tensor)}
    tensors = [found for found in objects if type(found) in kinds]
    gradients = [one.grad for one in tensors if one.is_leaf and one.grad is not None]
    for found in (*tensors, *gradients, *_saved_by_autograd(tensors)):
        if found.layout is not torch.strided:
            continue
        with suppress(NotImplementedError, RuntimeError):  # a wrapper without a storage of its own
            storage = found.untyped_storage()
            if storage.device.type == "cpu" and storage.data_ptr() and storage.resizable():
                spans.append((storage.data_ptr(), storage.data_ptr() + storage.nbytes()))
    return covered(spans)


def _saved_by_autograd(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield what the graphs of these tensors have saved."""
    nodes = [one.grad_fn for one in tensors if one.grad_fn is not None]
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        for name in dir(node):
            if name.startswith("_raw_saved_"):  # without hooks, such as those of checkpoints
                with suppress(RuntimeError):  # it was freed: the backward has run
                    saved = [one.data for one in pytree.tree_leaves(getattr(node, name))]
                    yield from (one for one in pytree.tree_leaves(saved) if isinstance(one, torch.Tensor))
        before = [one for one, _ in node.next_functions if one is not None and one not in seen]
        seen.update(before)
        nodes += before


def covered(spans: Iterable[tuple[int, int]]) -> int:
    """Return how many integers the half-open intervals contain together."""
    total, end = 0, 0
    for low, high in sorted(spans):
        total += max(high - max(low, end), 0)
        end = max(end, high)
    return total


def resident_growth(step: Step) -> int:
    """Return by how many bytes the resident set of this process grows at most during one step.

    The process must have been started with `RETURN_MEMORY` in its environment: otherwise the C allocator keeps what
    earlier steps freed, and the set does not grow.
    """
    step.clear()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reset_high_water_mark()
    before = _status("VmHWM")
    step.run()
    return _status("VmHWM") - before


def reset_high_water_mark() -> None:
    """Set the high-water mark of the resident set of this process to its present size (Linux)."""
    _CLEAR.write_text("5")


def _status(key: str) -> int:
    """Return an entry of the process's status, bytes."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return int(line.split()[1]) << 10


def median_seconds(step: Step, rounds: int) -> float:
    """Return the median of the seconds that a step takes."""
    seconds = []
    for _ in range(rounds):
        started = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def library_bytes(make: Callable[[], object]) -> int:
    """Return the bytes of the tensors that libraries keep for themselves once `make` has made a model of theirs.

    Example:
        >>> library_bytes(lambda: torch.nn.Linear(2, 2))
        0
    """
    make()
    return live_bytes()


def device_bytes(step: Step, apart: int) -> int:
    """Return `live_bytes` without `apart` of libraries, and without the host arena, which is in a CPU's own memory."""
    return live_bytes() - apart - _host_bytes(step)


def _host_bytes(step: Step) -> int:
    return 0 if step.plan is None else step.plan.host_size


def by_events(step: Step, rounds: int, apart: int) -> dict[str, Cell]:
    """Return time, standing bytes, the peak by memory events, and what the contender's plan had predicted.

    `apart` are bytes that are alive and not the step's, as `library_bytes`.
    """
    seconds = median_seconds(step, rounds)
    step.clear()
    standing = device_bytes(step, apart)
    return {
        "ms": seconds * 1e3,
        "standing": standing,
        "peak": standing + peak_growth(step),
        "host": _host_bytes(step) or None,
        "total": None if step.plan is None else step.plan.total,
        "padding": None if step.plan is None else step.plan.padding,
        "limit": None if step.plan is None else limit_of(step.plan),
        "how": step.how,
    }


def by_resident_set(step: Step, rounds: int, apart: int) -> dict[str, Cell]:
    """Return standing bytes, and their sum with the growth of the resident set, the median of `rounds` steps.

    `apart` is that of `by_events`.
    """
    step.clear()
    standing = device_bytes(step, apart)
    growth = statistics.median([resident_growth(step) for _ in range(rounds)])
    return {"standing": standing, "resident": standing + round(growth)}


METHODS = MappingProxyType({"events": by_events, "resident": by_resident_set})


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure one contender on one model, and print the figures in bytes as JSON; returns the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.peak_measure", description="One contender's peak.")
    parser.add_argument("method", choices=list(METHODS))
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--mode", choices=["training", "inference"], default="training")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    make = partial(MODELS[options.model], options.size)
    apart = library_bytes(make)
    started = time.perf_counter()
    step = CONTENDERS[options.contender].step(*make(), options.mode)
    for _ in range(WARM_UP):
        step.run()
    setup = time.perf_counter() - started
    print(json.dumps(METHODS[options.method](step, options.rounds, apart) | {"setup_s": setup, "pid": os.getpid()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
