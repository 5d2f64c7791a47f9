"""Which units run on which device: contiguous runs of them, in order, by dynamic programming.

Every run of units has a price: the most bytes that its storages, and copies of what it needs of others, have alive at
once (without in-place reuse, so never too few), and the seconds of the transfers into it. With budgets, the transfers
are made as short as the budgets allow; without, the largest device is made as small as it can be, and the transfers as
short as a tenth more bytes allow (PipeDream, Narayanan et al. 2019, divides layers alike by time).
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

_SLACK = 1.1  # of the smallest largest device: bytes given for shorter transfers
_NONE = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """`ends[k]`: device k runs the units before it that devices before it do not. Bytes and seconds are estimates."""

    ends: tuple[int, ...]
    nbytes: tuple[int, ...]
    seconds: float

    def device_of(self, unit: int) -> int:
        """The device (position) that runs a unit."""
        return next(k for k, end in enumerate(self.ends) if unit < end)


@dataclass(frozen=True, slots=True)
class _Life:
    """A storage of the arena: its bytes and the (step, unit) of every op that computes with it, and its ends."""

    size: int
    home: int
    first: int
    last: int
    touches: tuple[tuple[int, int], ...]


def assign(
    graph: Graph, units: Units, link: Link, *, alignment: int, count: int, budgets: Sequence[int] | None
) -> Assignment:
    """Divide the units of `graph` among `count` devices. `budgets`: bytes of each device's arena.

    Raises `BudgetInfeasible`, with the smallest budget for every device alike at which there is a way.
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
            f"no run of blocks fits: divided best, a device holds {format_bytes(int(least))} at once",
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
    """The best worth of dividing `m` units into `count` runs (empty ones too), and where the runs end."""
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


def _lives(graph: Graph, units: Units, alignment: int) -> list[_Life]:
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
        found.append(_Life(size, touches[0][1] if touches else 0, first, last, touches))
    return found


def _price(lives: Sequence[_Life], steps: int, start: int, end: int, link: Link) -> tuple[int, float]:
    """Bytes alive at once on a device that runs the units [start, end), and seconds of the transfers to it."""
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
