"""`memplan.record`: what one run of any function allocates, how little it would need if placed by plan, and its replay.

For what cannot be traced. The profiler sees every allocation of the device, in whatever language it was asked
for; so does memplan's own allocator, where a program has installed it for CUDA. Each becomes a buffer, alive from
its allocation to its release; the solver places them. With the allocator, later runs can be served from the plan.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from memplan.core.problem import Buffer, Problem, Solution
from memplan.core.units import format_bytes
from memplan.errors import MemplanError, UnsupportedCall
from memplan.recording.allocator import Allocator, cuda_backing
from memplan.recording.tape import Tape, TapeEvent, lives, make_tape
from memplan.report.partition_table import partition_table
from memplan.runtime.kernels.pool_placement import cuda_runtime
from memplan.runtime.memory.measure import quiet_kineto
from memplan.solvers import solve
from memplan.trace import alignment_of

_SHOWN = 10  # buffers at the peak that a report lists
_log = logging.getLogger("memplan")


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One run's allocations, placed. Sizes are bytes, steps are allocations and releases in their order.

    `problem` holds what was released again within the run; `kept` is what was not (results, state made in it),
    and `peak` the most that was allocated at once, both together, above what there was before.
    """

    problem: Problem
    solution: Solution
    kept: int
    peak: int
    tape: Tape
    allocator: Allocator | None = field(default=None, repr=False, compare=False)

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Serve what the block allocates from one arena, at the planned addresses, as long as it is the recorded run.

        At the first allocation that differs from the recorded ones, or would overwrite something that is still alive,
        the rest of the block gets ordinary memory; that is logged once (logger "memplan"). Raises `UnsupportedCall`
        unless memplan's allocator was installed when this was recorded.
        """
        allocator = self.allocator
        if allocator is None:
            what = "this run was recorded without memplan's allocator, which would have to serve the replay"
            hint = "call memplan.install_allocator() before anything uses CUDA; on the CPU, nothing is replayed"
            raise UnsupportedCall(what, where="replay", hint=hint)
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

    @property
    def arena_size(self) -> int:
        """Bytes of an arena for everything that does not outlive the run."""
        return self.solution.arena_size

    @property
    def max_live(self) -> int:
        """Largest sum of live buffer sizes: no layout needs less."""
        return self.problem.max_live

    @property
    def fragmentation(self) -> float:
        """1 - max_live / arena_size."""
        return 1 - self.max_live / self.arena_size if self.arena_size else 0.0

    def report(self) -> str:
        """The figures and the largest buffers at the peak, as text."""
        alive = sorted(self.problem.alive_at(self.problem.peak_step), key=lambda b: -b.size)
        lines = [
            f"{len(self.problem.buffers)} allocations",
            f"arena {format_bytes(self.arena_size)}, max live {format_bytes(self.max_live)},"
            f" kept {format_bytes(self.kept)}, peak {format_bytes(self.peak)}",
            *(f"  {format_bytes(b.size):>12}  {b.origin}" for b in alive[:_SHOWN]),
        ]
        return "\n".join(lines)

    def to_text(self) -> str:
        """The step x partition table, as `Plan.to_text`."""
        return partition_table(self.problem)


_installed: list[Allocator] = []  # at most one, as the process has


def install_allocator() -> None:
    """Let all CUDA memory of this process come from memplan's allocator, so that recorded runs can be replayed.

    Process-wide, and only before CUDA is first used: raises `UnsupportedCall` when it is too late, or without CUDA.
    PyTorch's own statistics (`torch.cuda.memory_allocated`, snapshots) are not available with it, and memory that one
    stream allocates must not be used on another one after its release (`record_stream` has no effect).
    """
    if _installed:
        return
    hint = "call memplan.install_allocator() once, first thing in the program"
    if not torch.cuda.is_available():
        raise UnsupportedCall("no CUDA device is available", where="install_allocator", hint="record on the CPU")
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        raise UnsupportedCall("CUDA is in use already, with another allocator", where="install_allocator", hint=hint)
    allocator = Allocator(cuda_backing(cuda_runtime()))
    made = torch._C._cuda_customAllocator(*allocator.pointers)
    try:
        torch.cuda.memory.change_current_allocator(torch.cuda.memory._CUDAAllocator(made))
    except RuntimeError as error:
        raise UnsupportedCall(str(error).splitlines()[0], where="install_allocator", hint=hint) from error
    _installed.append(allocator)


def record(
    step_fn: Callable[[], Any],
    *,
    device: str | torch.device = "cpu",
    warm_up: int = 1,
    solver: Any = "auto",
    time_limit: float | None = None,
) -> Recording:
    """Run `step_fn()` and plan what it allocated on `device`; `warm_up` runs come first, so that caches are full.

    Nothing is changed in how `step_fn` runs: this plans and reports. On CUDA, later runs can be served from the plan
    (`Recording.replay`) when the program began with `memplan.install_allocator()`.
    Raises `MemplanError` when another profiler is running.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise MemplanError("another profiler is running", hint="record outside of it")
    device = torch.device(device)
    allocator = _installed[0] if _installed and device.type == "cuda" else None
    for _ in range(warm_up):
        step_fn()
    watch = _profiled if allocator is None else _hooked(allocator)
    events = _without_collecting(lambda: watch(step_fn, device))
    return recording_of(events, alignment_of(device), allocator, solver=solver, time_limit=time_limit)


def recording_of(
    events: Sequence[TapeEvent],
    alignment: int,
    allocator: Allocator | None = None,
    *,
    solver: Any = "auto",
    time_limit: float | None = None,
) -> Recording:
    """What was allocated and released, in order, as a problem and its solution. `alignment` is in bytes."""
    buffers, kept = _buffers(events, alignment)
    problem = Problem(buffers=tuple(buffers))
    solution = solve(problem, solver=solver, time_limit=time_limit)
    return Recording(
        problem=problem,
        solution=solution,
        kept=kept,
        peak=_peak(events),
        tape=make_tape(events, problem, solution.offsets, solution.arena_size),
        allocator=allocator,
    )


def _without_collecting(function: Callable[[], list[TapeEvent]]) -> list[TapeEvent]:
    """Call it with no collection of garbage in between."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        return function()
    finally:
        if collecting:
            gc.enable()


def _profiled(step_fn: Callable[[], Any], device: torch.device) -> list[TapeEvent]:
    """The allocations and releases of one run, in order, as the profiler sees them."""
    with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
        result = step_fn()
    del result
    found = sorted(_allocations(profiler.kineto_results.experimental_event_tree(), ""), key=lambda pair: pair[0])
    return [TapeEvent(a.ptr, a.alloc_size, op) for _, a, op in found if a.device.type == device.type and a.ptr]


def _hooked(allocator: Allocator) -> Callable[[Callable[[], Any], torch.device], list[TapeEvent]]:
    """The same as the installed allocator sees them, which knows no ops; what the run returns outlives it."""

    def watch(step_fn: Callable[[], Any], _: torch.device) -> list[TapeEvent]:
        allocator.start_recording()
        result = None
        try:
            result = step_fn()
        finally:
            events = allocator.stop_recording()
        del result
        return events

    return watch


def _allocations(nodes: Any, op: str) -> Iterator[tuple[int, Any, str]]:
    """(time, allocation, innermost op) of every memory event in the profiler's tree."""
    for node in nodes:
        if node.tag == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, node.extra_fields, op
        name = node.name if node.tag == torch._C._profiler._EventType.TorchOp else op
        yield from _allocations(node.children, name)


def _buffers(events: Sequence[TapeEvent], alignment: int) -> tuple[list[Buffer], int]:
    """A buffer for each allocation that is released again, and the bytes of those that are not."""
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
    """The most bytes above those at the start; releases of what was there before lower nothing."""
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
