"""`shared`: greedy by size into shared objects, the default of ExecuTorch (and of TFLite on GPUs).

The largest buffer comes first. Each goes into the smallest shared object none of whose buffers is alive together with
it; otherwise above those that are, in the first object with enough bytes (ExecuTorch's overlapping allocations);
otherwise into a new object of its size. Objects are placed one after another (executorch `exir/memory_planning.py`;
Pisarchyk and Lee 2020, "shared objects").
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers.base import NO_LIMITS, SolverLimits, align_up, finish


@dataclass(slots=True)
class _Object:
    size: int
    alignment: int
    tenants: list[tuple[int, Buffer]] = field(default_factory=list)  # (offset in the object, buffer)

    def top_during(self, buffer: Buffer) -> int:
        """The highest end, in the object, of its buffers that are alive together with `buffer`; 0 if there are none."""
        return max((at + b.size for at, b in self.tenants if not b.live.is_disjoint(buffer.live)), default=0)


class Shared:
    """Places buffers in shared objects. Gaps are ignored: a tensor of ExecuTorch has a single interval."""

    name = "shared"

    def refuses(self, problem: Problem) -> str | None:
        if any(b.pinned_offset is not None for b in problem.buffers):
            return "shared objects have no fixed address, so a buffer cannot be pinned to one"
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        objects: list[_Object] = []
        for buffer in sorted(problem.buffers, key=lambda b: -b.size):
            _settle(buffer, objects)
        offsets: dict[str, int] = {}
        top = 0
        for shared in objects:
            base = align_up(top, shared.alignment)
            offsets.update((b.id, base + at) for at, b in shared.tenants)
            top = base + shared.size
        return finish(problem, offsets, solver=self.name, seconds=time.perf_counter() - began)


def _settle(buffer: Buffer, objects: list[_Object]) -> None:
    tops = [shared.top_during(buffer) for shared in objects]
    empty = [i for i, top in enumerate(tops) if not top]
    chosen, at = min(empty, key=lambda i: objects[i].size) if empty else None, 0
    if chosen is None:
        for i, top in enumerate(tops):
            above = align_up(top, buffer.alignment)
            if above + buffer.size <= objects[i].size:
                chosen, at = i, above
                break
    if chosen is None:
        chosen = len(objects)
        objects.append(_Object(size=buffer.size, alignment=buffer.alignment))
    objects[chosen].alignment = max(objects[chosen].alignment, buffer.alignment)
    objects[chosen].tenants.append((at, buffer))
