"""Steps 2 and 3 of the portfolio: place-or-skip search on one piece, restarted by a bandit.

An arm is a ranking of the buffers and a rule for the section to decide next (`branch_kernel.py`). Every arm
is tried briefly; then arms are drawn by how little they left unplaced, with perturbed rankings and node limits
after Luby et al. ("Optimal speedup of Las Vegas algorithms", 1993). Failed states are remembered across restarts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.solve.budget import Budget
from memplan.solve.core import Core, Ints, load_of

# Rules for the section: how few candidates make it urgent, and whether buffers that fit a corner come first.
_RULES = ((3, True), (4, True), (5, False), (1, False))
_TABLE = 1 << 18  # remembered states
_NOISES = (0.05, 0.3)  # of the logarithm of a key
_FIRST_NODES, _SLICE_NODES, _LEAST_NODES = 2, 1, 100  # per buffer, per buffer, at least


class Outcome(enum.Enum):
    """What a search says about a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """Buffers with their highest offsets (units), who meets whom, and who is alive in each section."""

    core: Core
    max_offset: Ints
    adj_ptr: Ints
    adj: npt.NDArray[np.int32]
    mem_ptr: Ints
    mem: npt.NDArray[np.int32]


def instance_of(core: Core, max_offset: Ints) -> Instance:
    """`core` ready to be searched. Time and memory in proportion to the pairs that are alive together."""
    from memplan.solve import fit_kernel

    by_start = np.argsort(core.lo, kind="stable")
    segments = (core.seg_ptr, core.seg_lo, core.seg_hi)
    adj_ptr, adj = fit_kernel.neighbours(core.n, *segments, core.lo, core.hi, by_start)
    mem_ptr, mem = fit_kernel.members(core.sections, *segments)
    return Instance(core=core, max_offset=max_offset, adj_ptr=adj_ptr, adj=adj, mem_ptr=mem_ptr, mem=mem)


def search(piece: Instance, budget: Budget, seed: int) -> tuple[Outcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be done, or give up when `budget` is over.

    Returns the outcome and, if SOLVED, the offsets (units).
    """
    n = piece.core.n
    offsets = np.zeros(n, np.int64)
    keys = _rankings(piece.core)
    arms = [(key, rule) for key in range(len(keys)) for rule in _RULES]
    left = np.full(len(arms), np.inf)
    table = np.zeros(_TABLE, np.int64)
    random = np.random.default_rng(seed)
    run = 0
    while not budget.is_over:
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
            nodes=max(nodes, _LEAST_NODES),
            table=table,
            offsets=offsets,
            budget=budget,
        )
        left[arm] = min(left[arm], area)
        if outcome is not Outcome.LIMIT:
            return outcome, offsets
        run += 1
    return Outcome.LIMIT, offsets


def _run(
    piece: Instance,
    key: npt.NDArray[np.float64],
    *,
    rule: tuple[int, bool],
    nodes: int,
    table: Ints,
    offsets: Ints,
    budget: Budget,
) -> tuple[Outcome, int]:
    from memplan.solve import search_kernel as kernel

    core = piece.core
    rank = np.empty(core.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(core.n)
    capacity = int((piece.max_offset + core.size).max())
    status, spent, area = kernel.search(
        capacity, core.size, core.align, core.low, piece.max_offset, core.seg_ptr, core.seg_lo, core.seg_hi,
        core.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule,
        budget.nodes(nodes, core.n), table, 1, offsets,
    )  # fmt: skip
    budget.spend(spent, core.n)
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
