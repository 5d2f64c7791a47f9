"""Place-or-skip search on one form of a piece, restarted by a bandit.

A form is a piece as it is or with buffers joined (`join.py`). An arm is a ranking of its buffers and a rule for
the section to decide next (`branch_kernel.py`). Every arm is tried briefly; then arms are drawn by how little they
left unplaced, with perturbed rankings and node limits after Luby et al. ("Optimal speedup of Las Vegas
algorithms", 1993). Failed states are remembered across restarts. Of the brief tries every second one, after the
first few, draws all conclusions after a decision (`propagate_kernel.py`): some instances need a tenth of the nodes
then, others as many, and each takes longer. Where joins were guessed, so does every second one of the others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.solvers import thresholds
from memplan.solvers.arrays.instance import Instance, PieceOutcome
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of
from memplan.solvers.limits import Budget
from memplan.solvers.search.join import Joined

Floats = npt.NDArray[np.float64]

# Rules for the section: how few candidates make it urgent, and whether buffers that fit a corner come first.
RULES = ((3, True), (4, True), (5, False), (1, False))
_NOISES = (0.05, 0.3)  # of the logarithm of a key
_FIRST_NODES, _SLICE_NODES = 2, 1  # per buffer
_THOROUGH_NODES = 3  # nodes that take as long as one after which all conclusions are drawn


class SearchVariant:
    """A piece, perhaps with buffers joined, and what is known of the arms on it."""

    def __init__(self, joined: Joined, table: Ints, salt: int, *, guessed: bool) -> None:
        """`table` remembers failed states; `salt` tells those of other forms apart."""
        self.joined, self.runs = joined, 0
        self._table, self._salt, self._guessed = table, salt, guessed
        self._keys = _rankings(joined.piece.core)
        self._arms = [(key, rule) for key in range(len(self._keys)) for rule in RULES]
        self._left = np.full(len(self._arms), np.inf)

    @property
    def size(self) -> int:
        """How many buffers are left."""
        return self.joined.piece.core.n

    def run(self, budget: Budget, random: np.random.Generator) -> tuple[PieceOutcome, Ints]:
        """The next arm, briefly; after all of them one that left little unplaced, with a perturbed ranking.

        Returns the outcome for the form and, if SOLVED, the offsets of the buffers of the original piece (units).
        """
        run, arms, n = self.runs, len(self._arms), self.size
        self.runs += 1
        if run < arms:
            arm, nodes, key = run, _FIRST_NODES * n, self._keys[self._arms[run][0]]
        else:
            by_score = np.argsort(self._left, kind="stable")
            arm = int(by_score[min(int(random.exponential(arms / 3)), arms - 1)])
            nodes = _SLICE_NODES * n * luby(run - arms + 1)
            noise = _NOISES[int(random.integers(2))]
            key = self._keys[self._arms[arm][0]] * np.exp(random.normal(0.0, noise, n))
        outcome, area, offsets = search_once(
            self.joined.piece,
            key,
            rule=self._arms[arm][1],
            thorough=run >= len(RULES) and run % 2 == 0 and (run < arms or self._guessed),
            nodes=max(nodes, thresholds.LEAST_NODES),
            table=self._table,
            salt=self._salt,
            budget=budget,
        )
        self._left[arm] = min(self._left[arm], area)
        return outcome, self.joined.expand(offsets)


def search_once(
    piece: Instance,
    key: Floats,
    *,
    rule: tuple[int, bool],
    thorough: bool,
    nodes: int,
    table: Ints,
    salt: int,
    budget: Budget,
) -> tuple[PieceOutcome, int, Ints]:
    """One run: the outcome, the least area left unplaced (units x sections), and offsets (complete if SOLVED)."""
    from memplan.solvers.search import search_kernel as kernel

    core, cost = piece.core, _THOROUGH_NODES if thorough else 1
    rank, offsets = np.empty(core.n, np.int64), np.zeros(core.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(core.n)
    capacity = int((piece.max_offset + core.size).max())
    status, spent, area = kernel.search(
        capacity, core.size, core.align, core.low, piece.max_offset, core.seg_ptr, core.seg_lo, core.seg_hi,
        core.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule, thorough,
        budget.nodes(nodes * cost, core.n) // cost + 1, thresholds.ROOM, thresholds.ENDS, thresholds.ROUNDS,
        table, salt, offsets,
    )  # fmt: skip
    budget.spend(spent * cost, core.n)
    outcome = {kernel.SOLVED: PieceOutcome.SOLVED, kernel.EXHAUSTED: PieceOutcome.EXHAUSTED}.get(
        status, PieceOutcome.LIMIT
    )
    return outcome, area, offsets


def _rankings(core: ProblemArrays) -> list[Floats]:
    """Which buffer first, at equal offsets: long-lived, in busy sections, large in area, large in bytes."""
    load = np.concatenate((np.zeros(1), np.cumsum(load_of(core).astype(np.float64))))
    life = (core.hi - core.lo).astype(np.float64)
    size = core.size.astype(np.float64)
    return [life, load[core.hi] - load[core.lo], life * size, size, life * life * size]


def luby(i: int) -> int:
    """1, 1, 2, 1, 1, 2, 4, ... for i = 1, 2, 3, ..."""
    while True:
        bits = i.bit_length()
        if i == (1 << bits) - 1:
            return 1 << (bits - 1)
        i -= (1 << (bits - 1)) - 1
