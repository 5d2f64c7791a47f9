"""Steps 2 and 3 of the portfolio: tree search on one piece.

The search places or skips one buffer after another (`search_kernel.py`), with restarts chosen by a multi-armed bandit.
An arm is a ranking of the buffers and a branching rule (`branch_kernel.py`). Every arm is first run briefly. Then arms
are drawn by the unplaced area that they left, with perturbed rankings and with node limits after Luby et al. ("Optimal
speedup of Las Vegas algorithms", 1993). Failed states are stored across restarts.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.solvers import thresholds
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, ProblemArrays, load_of
from memplan.solvers.base import WorkBudget

Floats = npt.NDArray[np.float64]

# Branching rules: the number below which a section has few candidates, and whether buffers that fit a corner go first.
RULES = ((3, True), (4, True), (5, False), (1, False))
_NOISES = (0.05, 0.3)  # standard deviations of the noise on the logarithm of a key
_FIRST_NODES, _SLICE_NODES = 2, 1  # nodes per buffer


def search(piece: Instance, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be placed, or give up when `budget` is over.

    Each arm is run briefly; once all were run, arms that left little unplaced, with perturbed rankings. Returns the
    outcome and, if SOLVED, the offsets (units).
    """
    random, table = np.random.default_rng(seed), np.zeros(thresholds.TABLE, np.int64)
    keys, n = _rankings(piece.arrays), piece.arrays.n
    arms = [(key, rule) for key in keys for rule in RULES]
    left = np.full(len(arms), np.inf)
    run = 0
    while not budget.is_over:
        if run < len(arms):
            arm, nodes, key = run, _FIRST_NODES * n, arms[run][0]
        else:
            by_score = np.argsort(left, kind="stable")
            arm = int(by_score[min(int(random.exponential(len(arms) / 3)), len(arms) - 1)])
            nodes = _SLICE_NODES * n * luby(run - len(arms) + 1)
            noise = _NOISES[int(random.integers(2))]
            key = arms[arm][0] * np.exp(random.normal(0.0, noise, n))
        run += 1
        nodes = max(nodes, thresholds.LEAST_NODES)
        outcome, area, offsets = search_once(piece, key, rule=arms[arm][1], nodes=nodes, table=table, budget=budget)
        if outcome is not PieceOutcome.LIMIT:
            return outcome, offsets
        left[arm] = min(left[arm], area)
    return PieceOutcome.LIMIT, np.full(n, -1, np.int64)


def search_once(
    piece: Instance, key: Floats, *, rule: tuple[int, bool], nodes: int, table: Ints, budget: WorkBudget
) -> tuple[PieceOutcome, int, Ints]:
    """Run the tree search once, up to `nodes` nodes.

    Returns the outcome, the smallest unplaced area (units x sections), and the offsets, which are complete if SOLVED.
    """
    from memplan.solvers import search_kernel as kernel

    arrays = piece.arrays
    rank, offsets = np.empty(arrays.n, np.int64), np.zeros(arrays.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(arrays.n)
    capacity = int((piece.max_offset + arrays.size).max())
    status, spent, area = kernel.search(
        capacity, arrays.size, arrays.align, arrays.low, piece.max_offset, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi,
        arrays.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule,
        budget.nodes(nodes, arrays.n) + 1, thresholds.ROOM, thresholds.ROUNDS, table, offsets,
    )  # fmt: skip
    budget.spend(spent, arrays.n)
    outcome = {kernel.SOLVED: PieceOutcome.SOLVED, kernel.EXHAUSTED: PieceOutcome.EXHAUSTED}.get(
        status, PieceOutcome.LIMIT
    )
    return outcome, area, offsets


def _rankings(arrays: ProblemArrays) -> list[Floats]:
    """The keys that rank buffers at equal offsets: live steps, load of their sections, area, size, and a mixed one."""
    load = np.concatenate((np.zeros(1), np.cumsum(load_of(arrays).astype(np.float64))))
    life = (arrays.hi - arrays.lo).astype(np.float64)
    size = arrays.size.astype(np.float64)
    return [life, load[arrays.hi] - load[arrays.lo], life * size, size, life * life * size]


def luby(i: int) -> int:
    """The i-th term of Luby's sequence: 1, 1, 2, 1, 1, 2, 4, ... for i = 1, 2, 3, ..."""
    while True:
        bits = i.bit_length()
        if i == (1 << bits) - 1:
            return 1 << (bits - 1)
        i -= (1 << (bits - 1)) - 1
