"""Steps 2 and 3 of the portfolio: place-or-skip search on one piece, restarted by a bandit.

An arm is a ranking of the buffers and a rule for the section to decide next. Every arm is tried briefly;
then arms are drawn by how little they left unplaced, with perturbed rankings and node limits after Luby et
al. ("Optimal speedup of Las Vegas algorithms", 1993). Failed states are remembered across restarts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.solve.budget import Budget
from memplan.solve.core import Core, Ints, sections_of

_RULES = 3
_TABLE = 1 << 18  # remembered states
_FIRST_NODES, _SLICE_NODES, _LEAST_NODES = 2, 5, 100  # per buffer, per buffer, at least


class Outcome(enum.Enum):
    """What a search says about a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One piece in its own sections, with who meets whom and who is alive in each section."""

    size: Ints
    align: Ints
    low: Ints
    max_offset: Ints
    seg_ptr: Ints
    seg_lo: Ints
    seg_hi: Ints
    lo: Ints
    hi: Ints
    sections: int
    capacity: int  # units
    adj_ptr: Ints
    adj: npt.NDArray[np.int32]
    mem_ptr: Ints
    mem: npt.NDArray[np.int32]

    @property
    def n(self) -> int:
        return int(self.size.shape[0])


def instance_of(core: Core, ids: Ints, base: int, max_offset: Ints) -> Instance:
    """The buffers `ids` of `core`, at `base` units or above, each at its `max_offset` or below."""
    from memplan.solve import fit_kernel

    counts = np.diff(core.seg_ptr)[ids]
    seg_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    segments = np.repeat(core.seg_ptr[ids] - seg_ptr[:-1], counts) + np.arange(seg_ptr[-1])
    seg_lo, seg_hi, steps = sections_of(core.seg_lo[segments], core.seg_hi[segments])
    lo, hi = seg_lo[seg_ptr[:-1]], seg_hi[seg_ptr[1:] - 1]
    by_start = np.argsort(lo, kind="stable")
    adj_ptr, adj = fit_kernel.neighbours(len(ids), seg_ptr, seg_lo, seg_hi, lo, hi, by_start)
    mem_ptr, mem = fit_kernel.members(len(steps), seg_ptr, seg_lo, seg_hi)
    align = core.align[ids]
    return Instance(
        size=core.size[ids], align=align, low=np.maximum(core.low[ids], -(-base // align) * align),
        max_offset=max_offset[ids], seg_ptr=seg_ptr, seg_lo=seg_lo, seg_hi=seg_hi, lo=lo, hi=hi,
        sections=len(steps), capacity=int((max_offset + core.size)[ids].max()), adj_ptr=adj_ptr, adj=adj,
        mem_ptr=mem_ptr, mem=mem,
    )  # fmt: skip


def search(piece: Instance, budget: Budget, seed: int) -> tuple[Outcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be done, or give up when `budget` is over.

    Returns the outcome and, if SOLVED, the offsets (units).
    """
    n = piece.n
    offsets = np.zeros(n, np.int64)
    keys = _rankings(piece)
    arms = [(key, rule) for key in range(len(keys)) for rule in range(_RULES)]
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
            noise = (0.05, 0.3)[int(random.integers(2))]
            rank_key = keys[arms[arm][0]] * np.exp(random.normal(0.0, noise, n))
        outcome, area = _run(piece, rank_key, arms[arm][1], max(nodes, _LEAST_NODES), table, offsets, budget)
        left[arm] = min(left[arm], area)
        if outcome is not Outcome.LIMIT:
            return outcome, offsets
        run += 1
    return Outcome.LIMIT, offsets


def _run(
    piece: Instance, key: npt.NDArray[np.float64], rule: int, nodes: int, table: Ints, offsets: Ints, budget: Budget
) -> tuple[Outcome, int]:
    from memplan.solve import search_kernel as kernel

    rank = np.empty(piece.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(piece.n)
    status, spent, area = kernel.search(
        piece.capacity, piece.size, piece.align, piece.low, piece.max_offset, piece.seg_ptr, piece.seg_lo,
        piece.seg_hi, piece.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, rule,
        budget.nodes(nodes, piece.n), table, 1, offsets,
    )  # fmt: skip
    budget.spend(spent, piece.n)
    outcome = {kernel.SOLVED: Outcome.SOLVED, kernel.EXHAUSTED: Outcome.EXHAUSTED}.get(status, Outcome.LIMIT)
    return outcome, area


def _rankings(piece: Instance) -> list[npt.NDArray[np.float64]]:
    """Which buffer first, at equal offsets: long-lived, in busy sections, large in area, large in bytes."""
    change = np.zeros(piece.sections + 1, np.int64)
    sizes = np.repeat(piece.size, np.diff(piece.seg_ptr))
    np.add.at(change, piece.seg_lo, sizes)
    np.subtract.at(change, piece.seg_hi, sizes)
    load = np.concatenate((np.zeros(1), np.cumsum(np.cumsum(change)[:-1].astype(np.float64))))
    life = (piece.hi - piece.lo).astype(np.float64)
    size = piece.size.astype(np.float64)
    return [life, load[piece.hi] - load[piece.lo], life * size, size, life * life * size]


def _luby(i: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ... for i = 1, 2, 3, ..."""
    while True:
        bits = i.bit_length()
        if i == (1 << bits) - 1:
            return 1 << (bits - 1)
        i -= (1 << (bits - 1)) - 1
