"""Steps 2 and 3 of the portfolio: place-or-skip search on one piece, restarted by a bandit.

An arm is a ranking of the buffers and a rule for the section to decide next (`branch_kernel.py`). Every arm
is tried briefly; then arms are drawn by how little they left unplaced, with perturbed rankings and node limits
after Luby et al. ("Optimal speedup of Las Vegas algorithms", 1993). Failed states are remembered across restarts.
Of the brief tries every second one, after the first few, draws all conclusions after a decision
(`tighten_kernel.py`): some instances need a tenth of the nodes then, others as many, and each takes longer.
The ejection search runs beside it: the tree finds tight packings and proves, the other finds loose ones sooner.
"""

from __future__ import annotations

import enum

import numpy as np
import numpy.typing as npt

from memplan.solve.budget import Budget
from memplan.solve.core import Core, Ints, load_of
from memplan.solve.eject import MOST, Ejection, Learnt
from memplan.solve.instance import Instance

# Rules for the section: how few candidates make it urgent, and whether buffers that fit a corner come first.
_RULES = ((3, True), (4, True), (5, False), (1, False))
_TABLE = 1 << 18  # remembered states
_NOISES = (0.05, 0.3)  # of the logarithm of a key
_FIRST_NODES, _SLICE_NODES, _LEAST_NODES = 2, 1, 100  # per buffer, per buffer, at least
_THOROUGH_NODES = 3  # nodes that take as long as one after which all conclusions are drawn
_TURNS = 1_000  # of the ejection search, in one go
_HEAD_START = 500_000  # units of work that the tree search alone gets at first, where capacities may be tight


class Outcome(enum.Enum):
    """What a search says about a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()


def search(piece: Instance, budget: Budget, seed: int, learnt: Learnt | None = None) -> tuple[Outcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be done, or give up when `budget` is over.

    Ejection search (`eject.py`) gets as much work: from the first few arms on if it has `learnt` to go on from,
    else after a head start, in which the tree finds what it can find.
    Returns the outcome and, if SOLVED, the offsets (units).
    """
    n = piece.core.n
    offsets = np.zeros(n, np.int64)
    keys = _rankings(piece.core)
    arms = [(key, rule) for key in range(len(keys)) for rule in _RULES]
    left = np.full(len(arms), np.inf)
    table = np.zeros(_TABLE, np.int64)
    random = np.random.default_rng(seed)
    ejection = Ejection(piece, seed, learnt) if n <= MOST else None
    run, treed = 0, 0  # of the tree search: runs, units of work
    ejected = _HEAD_START if learnt is None else 0  # units of work
    while not budget.is_over:
        before = budget.spent
        if ejection is not None and run >= len(_RULES) and ejected < treed:
            if ejection.run(_TURNS, budget):
                return Outcome.SOLVED, ejection.offsets
            ejected += budget.spent - before
            continue
        if run < len(arms):
            arm, nodes, rank_key = run, _FIRST_NODES * n, keys[arms[run][0]]
        else:
            by_score = np.argsort(left, kind="stable")
            arm = int(by_score[min(int(random.exponential(len(arms) / 3)), len(arms) - 1)])
            nodes = _SLICE_NODES * n * _luby(run - len(arms) + 1)
            noise = _NOISES[int(random.integers(2))]
            rank_key = keys[arms[arm][0]] * np.exp(random.normal(0.0, noise, n))
        outcome, area = _run(
            piece,
            rank_key,
            rule=arms[arm][1],
            thorough=len(_RULES) <= run < len(arms) and run % 2 == 0,
            nodes=max(nodes, _LEAST_NODES),
            table=table,
            offsets=offsets,
            budget=budget,
        )
        left[arm] = min(left[arm], area)
        if outcome is not Outcome.LIMIT:
            return outcome, offsets
        treed += budget.spent - before
        run += 1
    return Outcome.LIMIT, offsets


def _run(
    piece: Instance,
    key: npt.NDArray[np.float64],
    *,
    rule: tuple[int, bool],
    thorough: bool,
    nodes: int,
    table: Ints,
    offsets: Ints,
    budget: Budget,
) -> tuple[Outcome, int]:
    from memplan.solve import search_kernel as kernel

    core, cost = piece.core, _THOROUGH_NODES if thorough else 1
    rank = np.empty(core.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(core.n)
    capacity = int((piece.max_offset + core.size).max())
    status, spent, area = kernel.search(
        capacity, core.size, core.align, core.low, piece.max_offset, core.seg_ptr, core.seg_lo, core.seg_hi,
        core.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule, thorough,
        budget.nodes(nodes * cost, core.n) // cost + 1, table, 1, offsets,
    )  # fmt: skip
    budget.spend(spent * cost, core.n)
    outcome = {kernel.SOLVED: Outcome.SOLVED, kernel.EXHAUSTED: Outcome.EXHAUSTED}.get(status, Outcome.LIMIT)
    return outcome, area


def _rankings(core: Core) -> list[npt.NDArray[np.float64]]:
    """Which buffer first, at equal offsets: long-lived, in busy sections, large in area, large in bytes."""
    load = np.concatenate((np.zeros(1), np.cumsum(load_of(core).astype(np.float64))))
    life = (core.hi - core.lo).astype(np.float64)
    size = core.size.astype(np.float64)
    return [life, load[core.hi] - load[core.lo], life * size, size, life * life * size]


def _luby(i: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ... for i = 1, 2, 3, ..."""
    while True:
        bits = i.bit_length()
        if i == (1 << bits) - 1:
            return 1 << (bits - 1)
        i -= (1 << (bits - 1)) - 1
