"""`memplan.record`: records the allocations of one run of any function, plans them, and replays them on CUDA.

It is for functions that cannot be traced. The profiler reports every allocation on the device, from any language; so
does memplan's own allocator, if the program has installed it for CUDA. Each allocation becomes a buffer that is alive
until its release; the solver assigns offsets. With the allocator, later runs can use the planned addresses.
"""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from memplan.core.arguments import require_kind
from memplan.core.problem import Buffer, Problem, Solution
from memplan.core.units import format_bytes
from memplan.devices.kinds import alignment_of
from memplan.devices.measure import garbage_kept, quiet_kineto
from memplan.errors import MemplanError, UnsupportedCall
from memplan.recording.allocator import Allocator, cuda_backing
from memplan.recording.tape import Tape, TapeEvent, lives, make_tape, solve_lanes
from memplan.report.text_diagrams import partition_table
from memplan.solvers import Solver, solve

_SHOWN = 10  # buffers at the peak that a report lists
_log = logging.getLogger("memplan")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """The allocations of one run, and their planned offsets. `memplan.record` makes it.

    Attributes:
        problem: A buffer for each allocation that was released within the run. Sizes are bytes; steps count
            allocations and releases in their order.
        solution: The offsets of the buffers, in bytes.
        kept: The bytes that were not released within the run (results, new state).
        peak: The most bytes that were allocated at once, above those before the run.
        tape: The allocations and releases, in order, with their planned offsets.
        allocator: The installed allocator that recorded the run; None if the profiler did.

    Example:
        ```python
        recording = memplan.record(step)
        print(recording.arena_size, recording.max_live)  # bytes
        ```
    """

    problem: Problem
    solution: Solution
    kept: int
    peak: int
    tape: Tape
    allocator: Allocator | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Serve the allocations of the `with` block from one arena, at the planned addresses.

        From the first allocation that differs from the recorded ones (its size, its stream), or would overwrite live
        bytes, the rest of the block gets ordinary memory; that is logged once (logger "memplan"). Two streams share no
        bytes.

        Returns:
            A context manager.

        Raises:
            UnsupportedCall: memplan's allocator was not installed when the run was recorded.

        Example:
            ```python
            memplan.install_allocator()  # before anything uses CUDA
            recording = memplan.record(step, device="cuda")
            with recording.replay():
                step()
            ```
        """
        allocator = self.allocator
        if allocator is None:
            what = "this run was recorded without memplan's allocator, which would have to serve the replay"
            hint = "call memplan.install_allocator() before anything uses CUDA; on the CPU, nothing is replayed"
            raise UnsupportedCall(what, where="replay", hint=hint, see="recorded")
        allocator.load(self.tape)
        allocator.begin()
        complete = False
        try:
            yield
            complete = True
        finally:
            why = allocator.end()
            if why and complete and allocator.differences == 1:
                _log.warning("memplan.record: a replayed step is not the recorded one: %s", why)
            _warn_of_spilled(allocator)

    @property
    def arena_size(self) -> int:
        """The bytes of an arena for all allocations that were released within the run."""
        return self.solution.arena_size

    @property
    def max_live(self) -> int:
        """The largest sum of live buffer sizes, in bytes: no arena is smaller."""
        return self.problem.max_live

    @property
    def fragmentation(self) -> float:
        """1 - max_live / arena_size."""
        return 1 - self.max_live / self.arena_size if self.arena_size else 0.0

    def report(self) -> str:
        """Return the sizes, and the largest buffers at the peak, as text.

        Returns:
            One line for each figure and buffer.

        Example:
            ```python
            print(memplan.record(step).report())
            ```
        """
        alive = sorted(self.problem.alive_at(self.problem.peak_step), key=lambda b: -b.size)
        lines = [
            f"{len(self.problem.buffers)} allocations",
            f"arena {format_bytes(self.arena_size)}, max live {format_bytes(self.max_live)},"
            f" kept {format_bytes(self.kept)}, peak {format_bytes(self.peak)}",
            *(f"  {format_bytes(b.size):>12}  {b.origin}" for b in alive[:_SHOWN]),
        ]
        return "\n".join(lines)

    def to_text(self) -> str:
        """Return the table of steps and partitions as text, like `Plan.to_text`.

        Returns:
            The table; sizes are bytes.

        Example:
            ```python
            print(memplan.record(step).to_text())
            ```
        """
        return partition_table(self.problem)


_installed: list[Allocator] = []  # at most one in a process


def install_allocator() -> None:
    """Install memplan's CUDA allocator in this process, so that recorded runs can be replayed.

    It must be called before CUDA is first used, and holds for the whole process. PyTorch's statistics
    (`torch.cuda.memory_allocated`, snapshots) are not available with it, and memory that one stream allocates must not
    be used on another stream after its release (`record_stream` has no effect). A second call does nothing.

    Raises:
        UnsupportedCall: CUDA is not available, or is in use already.

    Example:
        ```python
        memplan.install_allocator()  # first thing in the program
        recording = memplan.record(step, device="cuda")
        ```
    """
    if _installed:
        return
    hint = "call memplan.install_allocator() once, first thing in the program"
    if not torch.cuda.is_available():
        raise UnsupportedCall(
            "no CUDA device is available", where="install_allocator", hint="record on the CPU", see="recorded"
        )
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UnsupportedCall(
            "CUDA is in use already, with another allocator", where="install_allocator", hint=hint, see="recorded"
        )
    allocator = Allocator(cuda_backing(_cuda_runtime()))
    made = torch._C._cuda_customAllocator(*allocator.pointers)
    try:
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(made))
    except RuntimeError as error:
        raise UnsupportedCall(
            str(error).splitlines()[0], where="install_allocator", hint=hint, see="recorded"
        ) from error
    _installed.append(allocator)


def record(
    step_fn: Callable[[], Any],
    *,
    device: str | torch.device = "cpu",
    warm_up: int = 1,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Recording:
    """Run `step_fn()`, and plan the memory that it allocated on `device`.

    The way in which `step_fn` runs is not changed. On CUDA, later runs can use the planned addresses
    (`Recording.replay`) if the program has called `memplan.install_allocator()` first.

    Args:
        step_fn: A function without arguments.
        device: The device whose allocations are recorded.
        warm_up: The number of runs before the recorded one, which fill caches.
        solver: The solver that assigns offsets, as in `memplan.solve`.
        time_limit: The time limit of the solver, in seconds.

    Returns:
        The recorded allocations and their offsets.

    Raises:
        MemplanError: Another profiler is running.

    Example:
        ```python
        recording = memplan.record(lambda: model(inputs).sum().backward())
        print(recording.peak, recording.arena_size)  # bytes
        ```
    """
    require_kind(step_fn, Callable, "record", "pass a function: lambda: model(inputs).sum().backward()")  # type: ignore[arg-type]
    if torch.autograd.profiler._is_profiler_enabled:
        raise MemplanError("another profiler is running", hint="call memplan.record outside of that profiler")
    device = torch.device(device)
    allocator = _installed[0] if _installed and device.type == "cuda" else None
    for _ in range(warm_up):
        step_fn()
    gc.collect()
    with garbage_kept():
        events = _profiled(step_fn, device) if allocator is None else _hooked(step_fn, allocator)
    return recording_of(events, alignment_of(device), allocator, solver=solver, time_limit=time_limit)


def recording_of(
    events: Sequence[TapeEvent],
    alignment: int,
    allocator: Allocator | None = None,
    *,
    solver: str | Solver = "auto",
    time_limit: float | None = None,
) -> Recording:
    """Return a recording of allocations and releases in order. `alignment` is in bytes."""
    buffers, kept = _buffers(events, alignment)
    problem = Problem(buffers=tuple(buffers))
    lanes = {b.id: events[b.live.start].lane for b in buffers}
    solution = solve_lanes(problem, lanes, partial(solve, solver=solver, time_limit=time_limit))
    return Recording(
        problem=problem,
        solution=solution,
        kept=kept,
        peak=_peak(events),
        tape=make_tape(events, problem, solution.offsets, solution.arena_size),
        allocator=allocator,
    )


def _profiled(step_fn: Callable[[], Any], device: torch.device) -> list[TapeEvent]:
    """Return the allocations and releases of one run, in order, as the profiler reports them."""
    with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        result = step_fn()
    del result
    found = sorted(_allocations(profiler.kineto_results.experimental_event_tree(), ""), key=lambda pair: pair[0])
    return [TapeEvent(a.ptr, a.alloc_size, op) for _, a, op in found if a.device.type == device.type and a.ptr]


def _hooked(step_fn: Callable[[], Any], allocator: Allocator) -> list[TapeEvent]:
    """Return the allocations and releases of one run, in order, by the installed allocator, which does not know ops.

    The result of the run is freed after the recording.
    """
    allocator.start_recording()
    result = None
    try:
        result = step_fn()
    finally:
        events = allocator.stop_recording()
        _warn_of_spilled(allocator)
    del result
    return events


def _warn_of_spilled(allocator: Allocator) -> None:
    """Log what the device had no room for: torch cannot be told that there is no memory, as its own allocator would."""
    spilled = allocator.take_spilled()
    if spilled:
        what = "memplan.record: the device was out of memory; %s are in managed memory, which is slow: use less memory"
        _log.warning(what, format_bytes(spilled))


def _allocations(nodes: Any, op: str) -> Iterator[tuple[int, Any, str]]:
    """Yield (time, allocation, innermost op) of every memory event in the profiler's tree."""
    for node in nodes:
        if node.tag == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, node.extra_fields, op
        name = node.name if node.tag == torch._C._profiler._EventType.TorchOp else op
        yield from _allocations(node.children, name)


def _buffers(events: Sequence[TapeEvent], alignment: int) -> tuple[list[Buffer], int]:
    """Return a buffer for each allocation that is released again, and the bytes of those that are not."""
    made = [(step, event) for step, event in enumerate(events) if event.nbytes > 0]
    buffers, kept = [], 0
    for (birth, event), live in zip(made, lives(events), strict=True):
        if live is None:
            kept += event.nbytes
            continue
        size = -(-event.nbytes // alignment) * alignment
        op = event.op or "outside any op"
        buffers.append(Buffer(id=f"{op}@{birth}", size=size, live=live, alignment=alignment, origin=op))
    return buffers, kept


def _peak(events: Sequence[TapeEvent]) -> int:
    """Return the most bytes above those at the start; releases of earlier allocations are not counted."""
    now = peak = 0
    known: set[int] = set()
    for event in events:
        if event.nbytes > 0:
            known.add(event.address)
        elif event.address not in known:
            continue
        now += event.nbytes
        peak = max(peak, now)
    return peak


def _cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime library that torch has loaded."""
    return ctypes.CDLL(f"libcudart.so.{str(torch.version.cuda).partition('.')[0]}")
