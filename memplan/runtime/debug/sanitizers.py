"""Sanitizers: checks of the bytes while a step runs, for tests and debugging.

`poison` fills a buffer with NaN (0x7F for integers) before its first write and after its last use, so that a read
outside its live interval shows in the results. `redzone` writes a pattern on both sides of every buffer and checks it
after every step, so that a write outside the buffer is found and named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from memplan.core.choices import Sanitize
from memplan.core.lifetimes import host_problem
from memplan.core.plan import Plan
from memplan.core.problem import Buffer
from memplan.errors import ArenaCorruption
from memplan.runtime.memory.arena import Arena, Memory
from memplan.trace.traced import TracedGraph

Callback = Callable[[], object]
_PATTERN = 0xA5


@dataclass(frozen=True, slots=True)
class Sanitizers:
    """The functions to call before and after the op of each step."""

    befores: tuple[tuple[Callback, ...], ...] = ()
    afters: tuple[tuple[Callback, ...], ...] = ()

    def before(self, step: int) -> Sequence[Callback]:
        return self.befores[step] if self.befores else ()

    def after(self, step: int) -> Sequence[Callback]:
        return self.afters[step] if self.afters else ()

    def around(self, inner: Sanitizers, steps: int) -> Sanitizers:
        """Return these sanitizers with `inner` between them and the op."""
        return Sanitizers(
            tuple((*self.before(step), *inner.before(step)) for step in range(steps)),
            tuple((*inner.after(step), *self.after(step)) for step in range(steps)),
        )


NO_SANITIZERS = Sanitizers()


def redzone_of(sanitize: Sanitize | None, alignment: int) -> int:
    """Return the bytes that the plan must leave on each side of every buffer for `sanitize`."""
    return alignment if sanitize == "redzone" else 0


def make_poison(traced: TracedGraph, plan: Plan, arena: Arena, host: Memory) -> Sanitizers:
    """Return sanitizers that poison each buffer before its first write and after its last use.

    They poison the arena, and host memory if the host itself copies.
    """
    steps = len(plan.schedule.order)
    before: list[list[Callback]] = [[] for _ in range(steps)]
    after: list[list[Callback]] = [[] for _ in range(steps)]
    graph = traced.graph
    dtype_of: dict[str, torch.dtype] = {}
    for value in sorted(
        graph.values, key=lambda value: value.dtype == "uint8"
    ):  # uint8 last: it is the dtype of copies
        dtype_of.setdefault(graph.storages[value.storage].name, getattr(torch, value.dtype))
    nbytes = {s.name: s.nbytes for s in graph.storages}
    kept = {graph.storages[graph.values[v].storage].name for v in graph.gradients}
    places: list[tuple[Sequence[Buffer], Mapping[str, int], Callable[[int, int], torch.UntypedStorage], int]]
    places = [(plan.problem.buffers, plan.solution.offsets, partial(arena.storage, plan), plan.redzone)]
    if plan.eviction is not None and arena.device.type == "cpu":  # a GPU copies after the host has run on
        copies = host_problem(plan.graph, plan.schedule, alignment=plan.alignment).buffers
        places.append((copies, plan.eviction.host.offsets, host.storage, 0))
    for buffers, offsets, storage, redzone in places:
        for buffer in buffers:
            dtype = dtype_of[buffer.id]
            place = partial(storage, offsets[buffer.id] + redzone, nbytes[buffer.id])
            poison = _poison(place, nbytes[buffer.id], dtype)
            before[buffer.live.start].append(poison)
            if buffer.id not in kept:
                after[buffer.live.end - 1].append(poison)
    return Sanitizers(tuple(map(tuple, before)), tuple(map(tuple, after)))


def _poison(place: Callable[[], torch.UntypedStorage], nbytes: int, dtype: torch.dtype) -> Callback:
    """Return what poisons bytes of an arena, wherever that is when it is called."""
    floats = dtype.is_floating_point or dtype.is_complex
    kind, value = (dtype, float("nan")) if floats else (torch.uint8, 0x7F)

    def fill() -> None:
        storage = place()
        view = torch.empty(0, dtype=kind, device=storage.device)
        view.set_(storage, 0, (nbytes // kind.itemsize,), (1,)).fill_(value)

    return fill


def make_redzone(traced: TracedGraph, plan: Plan, arena: Arena) -> Sanitizers:
    """Return sanitizers that write red zones when a buffer becomes alive and check them after each of its steps."""
    steps = len(plan.schedule.order)
    before: list[list[Callback]] = [[] for _ in range(steps)]
    after: list[list[Callback]] = [[] for _ in range(steps)]
    for buffer in plan.problem.buffers:
        low = plan.solution.offsets[buffer.id]
        high = low + buffer.size
        zones = _Zones(arena, plan, ((low, low + plan.redzone), (high - plan.redzone, high)))
        before[buffer.live.start].append(_write_pattern(zones))
        for step in range(buffer.live.start, buffer.live.end):
            op = plan.graph.ops[plan.schedule.order[step]]
            after[step].append(_check(zones, buffer.id, f"{op.name} ({op.target}) at step {step}"))
    return Sanitizers(tuple(map(tuple, before)), tuple(map(tuple, after)))


@dataclass(frozen=True, slots=True)
class _Zones:
    """Two ranges of bytes of an arena, wherever that is now."""

    arena: Arena
    plan: Plan
    ranges: tuple[tuple[int, int], ...]

    def tensors(self) -> list[torch.Tensor]:
        return [self.arena.bytes_at(self.plan, low, high) for low, high in self.ranges]


def _write_pattern(zones: _Zones) -> Callback:
    def write() -> None:
        for zone in zones.tensors():
            zone.fill_(_PATTERN)

    return write


def _check(zones: _Zones, name: str, where: str) -> Callback:
    def check() -> None:
        if any(bool((zone != _PATTERN).any()) for zone in zones.tensors()):
            raise ArenaCorruption(
                f"bytes next to buffer {name!r} were overwritten",
                where=where,
                hint="the kernel that ran at this step wrote outside its result; please report it with the op's name",
            )

    return check
