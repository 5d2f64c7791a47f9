"""Groups the ops of a step into units that run on one device: the repeated blocks of a model, and the ops between them.

A block is a module whose path ends in a number ("h.3"). It includes its submodules, their backward and their updates.
Paths are cut at the smallest depth that gives enough units.

`assign` gives each device a contiguous run of units, chosen by dynamic programming. Every run has a cost: its max live
bytes, with copies of the storages that it reads from other devices (without in-place reuse, so never too few), and the
seconds of the transfers to it. With budgets, the seconds of transfers are minimized under the budgets. Without budgets,
the largest device is made as small as possible, and then the seconds of transfers are minimized under a tenth more
bytes (PipeDream, Narayanan et al. 2019, divides layers by time in this way).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Graph, Op, Phase
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link

_NUMBER = re.compile(r"\d+")
_PER_DEVICE = 3  # units per device, so that devices can be balanced
_DEEPEST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Units:
    """The unit of each op: `of[i]` is that of op i, -1 for copies to and from the host, which follow their storage.

    `names` are the module paths of the units in the order of the forward, "" for the ops before the first block and
    after the last.
    """

    of: tuple[int, ...]
    names: tuple[str, ...]


def units_of(graph: Graph, devices: int) -> Units:
    """Return the units of `graph`, whose ops are in schedule order. Without blocks, the units are single modules."""
    found = _cut(graph, 0)
    for depth in range(1, _DEEPEST + 1):
        cut = _cut(graph, depth)
        if len(cut.names) >= 2:
            found = cut
        if len(cut.names) >= _PER_DEVICE * devices:
            return found
    return found if len(found.names) >= devices else _cut(graph, 0)


def _block(module: str, depth: int) -> str:
    """Return the module path up to its `depth`-th number, or to its last number if it has fewer; "" if it has none.

    Depth 0 returns the whole path.
    """
    if not depth:
        return module
    parts = module.split(".")
    numbers = [i for i, part in enumerate(parts) if _NUMBER.fullmatch(part)]
    return ".".join(parts[: numbers[min(depth, len(numbers)) - 1] + 1]) if numbers else ""


def _cut(graph: Graph, depth: int) -> Units:
    names, of = _forward(graph, depth)
    index = {name: i for i, name in enumerate(names) if name}
    home = {op.origin.module: of[i] for i, op in reversed(list(enumerate(graph.ops))) if of[i] >= 0}
    made: dict[int, int] = {}  # storage -> unit of its last writer
    last = 0
    for i, op in enumerate(graph.ops):
        if op.target in TRANSFERS:
            continue
        if of[i] < 0:
            block = index.get(_block(op.origin.module, depth), home.get(op.origin.module, -1))
            of[i] = block if block >= 0 and op.origin.module else _source(graph, op, made, last)
        last = of[i]
        made.update(dict.fromkeys(graph.written(op), last))
    return Units(of=tuple(of), names=tuple(names))


def _forward(graph: Graph, depth: int) -> tuple[list[str], list[int]]:
    """Return the names of the units, and the unit of each op of the forward.

    An op without a block belongs to the block before it, to a first unit before all blocks, or, if it has a module of
    its own, to a last unit after all blocks.
    """
    blocks = {i: _block(op.origin.module, depth) for i, op in enumerate(graph.ops) if _computes_forward(op)}
    last = list(dict.fromkeys(block for block in blocks.values() if block))[-1:]
    names: list[str] = []
    of = [-1] * len(graph.ops)
    current = -1
    for i, block in blocks.items():
        if block and block not in names:
            names.append(block)
        if block:
            current = names.index(block)
        elif current < 0 or (last and last[0] in names and names[-1] and graph.ops[i].origin.module):
            names.append("")
            current = len(names) - 1
        of[i] = current
    return names, of


def _computes_forward(op: Op) -> bool:
    return op.phase is Phase.FORWARD and op.target not in TRANSFERS


def _source(graph: Graph, op: Op, made: dict[int, int], last: int) -> int:
    """Return the unit that wrote the storages that `op` reads.

    If there are several, it is that of the last one; if there are none, `last`.
    """
    found = [made[s] for v in op.reads if (s := graph.values[v].storage) in made]
    return found[-1] if found else last


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
