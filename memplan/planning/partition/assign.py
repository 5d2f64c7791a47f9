"""Assigns units to devices: each device gets a contiguous run of units, chosen by dynamic programming.

Every run of units has a cost: its max live bytes, with copies of the storages that it reads from other devices (without
in-place reuse, so never too few), and the seconds of the transfers to it. With budgets, the seconds of transfers are
minimized under the budgets. Without budgets, the largest device is made as small as possible, and then the seconds of
transfers are minimized under a tenth more bytes (PipeDream, Narayanan et al. 2019, divides layers by time in this way).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link
from memplan.planning.partition.blocks import Units

_SLACK = 1.1  # times the smallest possible size of the largest device: bytes traded for shorter transfers
_NONE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The units of each device: device k runs the units [ends[k - 1], ends[k]), device 0 those before ends[0].

    `nbytes` per device and `seconds` of transfers are estimates.
    """

    ends: tuple[int, ...]
    nbytes: tuple[int, ...]
    seconds: float

    def device_of(self, unit: int) -> int:
        """Return the device, by position, that runs `unit`."""
        return next(k for k, end in enumerate(self.ends) if unit < end)


@dataclass(frozen=True, slots=True)
class _StorageInterval:
    """A planned storage: its bytes, its home unit, its first and last step, and the (step, unit) of every op that
    computes with it."""

    size: int
    home: int
    first: int
    last: int
    touches: tuple[tuple[int, int], ...]


def assign(
    graph: Graph, units: Units, link: Link, *, alignment: int, count: int, budgets: Sequence[int] | None
) -> Assignment:
    """Assign the units of `graph` to `count` devices. `budgets` are the largest bytes of each device's arena.

    Raises `BudgetInfeasible` with the smallest budget, the same for every device, for which an assignment exists.
    """
    lives = _lives(graph, units, alignment)
    steps, m = len(graph.ops), len(units.names)

    @cache
    def price(start: int, end: int) -> tuple[int, float]:
        return _price(lives, steps, start, end, link)

    def balanced(k: int, start: int, end: int, sofar: tuple[float, float]) -> tuple[float, float]:
        nbytes, seconds = price(start, end)
        return max(sofar[0], nbytes), sofar[1] + seconds

    least = _best(m, count, balanced)[0][0]
    limits = [int(least * _SLACK)] * count if budgets is None else list(budgets)

    def short(k: int, start: int, end: int, sofar: tuple[float, float]) -> tuple[float, float]:
        nbytes, seconds = price(start, end)
        return sofar[0] + (seconds if nbytes <= limits[k] else _NONE), max(sofar[1], nbytes)

    (seconds, _), ends = _best(m, count, short)
    if seconds == _NONE:
        raise BudgetInfeasible(
            f"no assignment of blocks fits: in the best one, a device needs {format_bytes(int(least))} at once",
            op="",
            smallest=int(least),
            where="budget",
            hint=f"give each device at least {int(least)} bytes, or more devices",
        )
    starts = (0, *ends[:-1])
    return Assignment(
        ends=ends, nbytes=tuple(price(a, b)[0] for a, b in zip(starts, ends, strict=True)), seconds=seconds
    )


_Worth = tuple[float, float]


def _best(m: int, count: int, add: Callable[[int, int, int, _Worth], _Worth]) -> tuple[_Worth, tuple[int, ...]]:
    """Return the least cost of dividing `m` units into `count` runs, which may be empty, and the ends of the runs."""
    best: list[tuple[_Worth, tuple[int, ...]] | None] = [((0.0, 0.0), ()), *([None] * m)]
    for k in range(count):
        after: list[tuple[_Worth, tuple[int, ...]] | None] = [None] * (m + 1)
        for end in range(m + 1):
            for start in range(end + 1):
                before = best[start]
                if before is None or (k == count - 1 and end < m):
                    continue
                way, known = (add(k, start, end, before[0]), (*before[1], end)), after[end]
                if known is None or way[0] < known[0]:
                    after[end] = way
        best = after
    found = best[m]
    assert found is not None
    return found


def _lives(graph: Graph, units: Units, alignment: int) -> list[_StorageInterval]:
    touched: dict[int, list[tuple[int, int]]] = {}
    ends: dict[int, tuple[int, int]] = {}
    for step, op in enumerate(graph.ops):
        for s in graph.touched(op):
            if graph.storages[s].planned:
                ends[s] = ends.get(s, (step, step))[0], step
                if op.target not in TRANSFERS:
                    touched.setdefault(s, []).append((step, units.of[step]))
    found = []
    for s, (first, last) in ends.items():
        size = -(-graph.storages[s].nbytes // alignment) * alignment
        touches = tuple(touched.get(s, ()))
        found.append(_StorageInterval(size, touches[0][1] if touches else 0, first, last, touches))
    return found


def _price(lives: Sequence[_StorageInterval], steps: int, start: int, end: int, link: Link) -> tuple[int, float]:
    """Return the max live bytes of a device that runs the units [start, end), and the seconds of transfers to it."""
    change = np.zeros(steps + 1, np.int64)
    seconds = 0.0
    for life in lives:
        here = [step for step, unit in life.touches if start <= unit < end]
        if start <= life.home < end:
            first, last = life.first, life.last
        elif here:
            first, last = here[0], here[-1]
            seconds += link.seconds(life.size)
        else:
            continue
        change[first] += life.size
        change[last + 1] -= life.size
    return int(np.cumsum(change).max(initial=0)), seconds
