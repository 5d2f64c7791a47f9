"""Place-or-skip tree search on one variant of a piece, with restarts chosen by a multi-armed bandit.

A variant is a piece as it is or with buffers joined (`join.py`). An arm is a ranking of the buffers and a branching
rule (`branch_kernel.py`). Every arm is first run briefly. Then arms are drawn by the unplaced area that they left, with
perturbed rankings and with node limits after Luby et al. ("Optimal speedup of Las Vegas algorithms", 1993). Failed
states are stored across restarts. After the first few, every second brief run applies all propagation rules
(`propagate_kernel.py`): some instances then need a tenth of the nodes, others as many, and each node takes longer. If
joins were guessed, every second later run does so too.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from memplan.solvers import thresholds
from memplan.solvers.arrays.instance import Instance, PieceOutcome
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, load_of
from memplan.solvers.limits import WorkBudget
from memplan.solvers.search.join import Joined

Floats = npt.NDArray[np.float64]

# Branching rules: the number below which a section has few candidates, and whether buffers that fit a corner go first.
RULES = ((3, True), (4, True), (5, False), (1, False))
_NOISES = (0.05, 0.3)  # standard deviations of the noise on the logarithm of a key
_FIRST_NODES, _SLICE_NODES = 2, 1  # nodes per buffer
_THOROUGH_NODES = 3  # nodes that take as long as one with all propagation rules


class SearchVariant:
    """A variant of a piece, perhaps with joined buffers, and the results of its arms."""

    def __init__(self, joined: Joined, table: Ints, salt: int, *, guessed: bool) -> None:
        """Start without results. `table` stores failed states; `salt` separates those of different variants."""
        self.joined, self.runs = joined, 0
        self._table, self._salt, self._guessed = table, salt, guessed
        self._keys = _rankings(joined.piece.arrays)
        self._arms = [(key, rule) for key in range(len(self._keys)) for rule in RULES]
        self._left = np.full(len(self._arms), np.inf)

    @property
    def size(self) -> int:
        """The number of buffers after joining."""
        return self.joined.piece.arrays.n

    def run(self, budget: WorkBudget, random: np.random.Generator) -> tuple[PieceOutcome, Ints]:
        """Run the next arm briefly; once all were run, an arm that left little unplaced, with a perturbed ranking.

        Returns the outcome for the variant and, if SOLVED, the offsets (units) of the buffers of the original piece.
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
    budget: WorkBudget,
) -> tuple[PieceOutcome, int, Ints]:
    """Run the tree search once, up to `nodes` nodes.

    Returns the outcome, the smallest unplaced area (units x sections), and the offsets, which are complete if SOLVED.
    """
    from memplan.solvers.search import search_kernel as kernel

    arrays, cost = piece.arrays, _THOROUGH_NODES if thorough else 1
    rank, offsets = np.empty(arrays.n, np.int64), np.zeros(arrays.n, np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(arrays.n)
    capacity = int((piece.max_offset + arrays.size).max())
    status, spent, area = kernel.search(
        capacity, arrays.size, arrays.align, arrays.low, piece.max_offset, arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi,
        arrays.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule, thorough,
        budget.nodes(nodes * cost, arrays.n) // cost + 1, thresholds.ROOM, thresholds.ENDS, thresholds.ROUNDS,
        table, salt, offsets,
    )  # fmt: skip
    budget.spend(spent * cost, arrays.n)
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
