"""`memplan.record`: what one run of any function allocates, and how little it would need if placed by plan.

For what cannot be traced. The profiler sees every allocation of the device, in whatever language it was asked
for. Each becomes a buffer, alive from its allocation to its release; the solver places them. Nothing is replayed:
the recording says what planning would gain.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from memplan.errors import MemplanError
from memplan.problem import Buffer, Interval, Problem, Solution
from memplan.report.partition_table import partition_table
from memplan.runtime.measure import quiet_kineto
from memplan.solve import solve
from memplan.trace import alignment_of
from memplan.units import format_bytes

_SHOWN = 10  # buffers at the peak that a report lists


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


@dataclass(frozen=True, slots=True)
class _Event:
    """An allocation (`nbytes` > 0) or a release at an address, by an op."""

    address: int
    nbytes: int
    op: str


def record(
    step_fn: Callable[[], Any],
    *,
    device: str | torch.device = "cpu",
    warm_up: int = 1,
    solver: Any = "auto",
    time_limit: float | None = None,
) -> Recording:
    """Run `step_fn()` and plan what it allocated on `device`; `warm_up` runs come first, so that caches are full.

    Nothing is changed in how `step_fn` runs: on every device, this plans and reports.
    Raises `MemplanError` when another profiler is running.
    """
    if torch.autograd.profiler._is_profiler_enabled:
        raise MemplanError("another profiler is running", hint="record outside of it")
    for _ in range(warm_up):
        step_fn()
    device = torch.device(device)
    events = _observe(step_fn, device)
    buffers, kept = _buffers(events, alignment_of(device))
    problem = Problem(buffers=tuple(buffers))
    return Recording(
        problem=problem,
        solution=solve(problem, solver=solver, time_limit=time_limit),
        kept=kept,
        peak=_peak(events),
    )


def _observe(step_fn: Callable[[], Any], device: torch.device) -> list[_Event]:
    """The allocations and releases of one run, in order; no collection of garbage in between."""
    gc.collect()
    collecting = gc.isenabled()
    gc.disable()
    try:
        with quiet_kineto(), torch.autograd.profiler.profile(profile_memory=True) as profiler:
            result = step_fn()
    finally:
        if collecting:
            gc.enable()
    del result
    wanted = torch.device(device).type
    found = sorted(_allocations(profiler.kineto_results.experimental_event_tree(), ""), key=lambda pair: pair[0])
    return [_Event(a.ptr, a.alloc_size, op) for _, a, op in found if a.device.type == wanted and a.ptr]


def _allocations(nodes: Any, op: str) -> Iterator[tuple[int, Any, str]]:
    """(time, allocation, innermost op) of every memory event in the profiler's tree."""
    for node in nodes:
        if node.tag == torch._C._profiler._EventType.Allocation:
            yield node.start_time_ns, node.extra_fields, op
        name = node.name if node.tag == torch._C._profiler._EventType.TorchOp else op
        yield from _allocations(node.children, name)


def _buffers(events: list[_Event], alignment: int) -> tuple[list[Buffer], int]:
    """A buffer for each allocation that is released again, and the bytes of those that are not."""
    open_at: dict[int, tuple[int, _Event]] = {}
    buffers: list[tuple[int, Buffer]] = []
    for step, event in enumerate(events):
        if event.nbytes > 0:
            open_at[event.address] = step, event
        elif event.address in open_at:
            birth, made = open_at.pop(event.address)
            size = -(-made.nbytes // alignment) * alignment
            live = Interval(birth, step)
            op = made.op or "outside any op"
            buffer = Buffer(id=f"{op}@{birth}", size=size, live=live, alignment=alignment, origin=op)
            buffers.append((birth, buffer))
    return [b for _, b in sorted(buffers, key=lambda pair: pair[0])], sum(e.nbytes for _, e in open_at.values())


def _peak(events: list[_Event]) -> int:
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
