"""Steps 2 and 3 of the portfolio: tree search on variants of one piece.

It alternates between the piece as it is, which is the only variant that proves anything, the piece with all likely
joins, and variants with most of them.

If one buffer ends at the step at which another of the same size starts, the second likely takes the offset of the
first. Buffers that start together and end together are likely adjacent. Joined buffers are searched as one (`joined`).
That reduces a piece to half its buffers or fewer, and a placement of it, if there is one, is found in a tenth to a
hundredth of the time. Joins are guesses, so an exhausted search with them proves nothing.

The search places or skips one buffer after another (`search_kernel.py`), with restarts chosen by a multi-armed bandit.
An arm is a ranking of the buffers and a branching rule (`branch_kernel.py`). Every arm is first run briefly. Then arms
are drawn by the unplaced area that they left, with perturbed rankings and with node limits after Luby et al. ("Optimal
speedup of Las Vegas algorithms", 1993). Failed states are stored across restarts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.solvers import thresholds
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, ProblemArrays, instance_of, load_of, sections_of
from memplan.solvers.base import WorkBudget


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """A piece with joined buffers: buffer b of the original is in `group[b]`, `above[b]` units above its bottom."""

    piece: Instance
    group: Ints
    above: Ints

    def expand(self, offsets: Ints) -> Ints:
        """The offsets of the original buffers for the offsets of `piece` (units)."""
        return np.asarray(offsets[self.group] + self.above)


def unjoined(piece: Instance) -> Joined:
    """`piece` without any join."""
    return Joined(piece=piece, group=np.arange(piece.arrays.n), above=np.zeros(piece.arrays.n, np.int64))


def joined(piece: Instance, *, chance: float = 0.0, seed: int = 0) -> Joined:
    """`piece` with each likely join at the probability `chance` (0 to 1). About n log n."""
    from memplan.solvers import join_kernel as kernel

    arrays = piece.arrays
    free = ~arrays.pinned & (arrays.align == 1) & (np.diff(arrays.seg_ptr) == 1) & (chance > 0.0)
    ceiling = piece.max_offset + arrays.size
    up, above, lo, hi, size, ceiling = kernel.join(
        arrays.size, arrays.lo, arrays.hi, arrays.sections, free, arrays.low, ceiling,
        round(chance * kernel.CERTAIN), seed,
    )  # fmt: skip
    kept = np.flatnonzero(up < 0)
    if len(kept) == arrays.n:
        return unjoined(piece)
    group, above = _roots(up, above)
    place = np.zeros(arrays.n, np.int64)
    place[kept] = np.arange(len(kept))
    smaller = _kept(arrays, kept, lo, hi, size)
    return Joined(piece=instance_of(smaller, (ceiling - size)[kept]), group=place[group], above=above)


def _roots(up: Ints, above: Ints) -> tuple[Ints, Ints]:
    """Return, for each buffer, the remaining buffer that contains it, and how far above that one's bottom it is."""
    root, total = np.arange(len(up)), np.zeros(len(up), np.int64)
    while (inside := up[root] >= 0).any():
        total += np.where(inside, above[root], 0)
        root = np.where(inside, up[root], root)
    return root, total


def _kept(arrays: ProblemArrays, kept: Ints, lo: Ints, hi: Ints, size: Ints) -> ProblemArrays:
    """The arrays of the buffers `kept`, with new hulls, and sizes in full units. Buffers with gaps keep their gaps."""
    counts = np.diff(arrays.seg_ptr)[kept]
    seg_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    segments = np.repeat(arrays.seg_ptr[kept] - seg_ptr[:-1], counts) + np.arange(seg_ptr[-1])
    start, end = arrays.seg_lo[segments], arrays.seg_hi[segments]
    start[seg_ptr[:-1]], end[seg_ptr[1:] - 1] = lo[kept], hi[kept]
    seg_lo, seg_hi, steps = sections_of(start, end)
    return ProblemArrays(
        unit=arrays.unit, size=size[kept], raw=size[kept] * arrays.unit, align=arrays.align[kept], low=arrays.low[kept],
        pinned=arrays.pinned[kept], seg_ptr=seg_ptr, seg_lo=seg_lo, seg_hi=seg_hi, lo=seg_lo[seg_ptr[:-1]],
        hi=seg_hi[seg_ptr[1:] - 1], steps=arrays.steps[steps], start=arrays.start[kept], source=kept,
    )  # fmt: skip


Floats = npt.NDArray[np.float64]

# Branching rules: the number below which a section has few candidates, and whether buffers that fit a corner go first.
RULES = ((3, True), (4, True), (5, False), (1, False))
_NOISES = (0.05, 0.3)  # standard deviations of the noise on the logarithm of a key
_FIRST_NODES, _SLICE_NODES = 2, 1  # nodes per buffer


class SearchVariant:
    """A variant of a piece, perhaps with joined buffers, and the results of its arms."""

    def __init__(self, joined: Joined, table: Ints, salt: int) -> None:
        """Start without results. `table` stores failed states; `salt` separates those of different variants."""
        self.joined, self.runs = joined, 0
        self._table, self._salt = table, salt
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
    nodes: int,
    table: Ints,
    salt: int,
    budget: WorkBudget,
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
        budget.nodes(nodes, arrays.n) + 1, thresholds.ROOM, thresholds.ROUNDS, table, salt, offsets,
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


_ALL, _AS_IT_IS, _SOME = 0, 1, 2  # kinds of variants, by the likely joins that are made
_CHANCES = (0.95, 0.9, 0.8)  # probabilities of a likely join in variants with some of them
_BUFFERS_PER_UNIT = 2  # buffers visited while a variant is made, for one unit of work


def search(piece: Instance, budget: WorkBudget, seed: int) -> tuple[PieceOutcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be placed, or give up when `budget` is over.

    The three kinds of variants get the same work. There is one variant with all likely joins and one with none. Of the
    third kind there are many, one after the other, each for a number of runs that follows Luby's sequence. Returns the
    outcome and, if SOLVED, the offsets (units).
    """
    runs = _Runs(piece, budget, seed)
    while not budget.is_over:
        outcome, offsets = runs.next()
        if outcome is not PieceOutcome.LIMIT:
            return outcome, offsets
    return PieceOutcome.LIMIT, np.full(piece.arrays.n, -1, np.int64)


class _Runs:
    """The runs of the tree search on the variants of a piece."""

    def __init__(self, piece: Instance, budget: WorkBudget, seed: int) -> None:
        self._piece, self._budget = piece, budget
        self._random = np.random.default_rng(seed)
        self._table = np.zeros(thresholds.TABLE, np.int64)
        self._made = 0  # variants
        self._variants = {_AS_IT_IS: self._make(0.0), _ALL: self._make(1.0)}
        self._spent = {_ALL: 0, _AS_IT_IS: 0, _SOME: 0}  # units of work of each kind that is searched
        if self._variants[_ALL].size == self._variants[_AS_IT_IS].size:  # nothing to guess
            self._spent = {_AS_IT_IS: 0}

    def next(self) -> tuple[PieceOutcome, Ints]:
        """Run once on the kind of variant that had the least work so far."""
        kind = min(self._spent, key=lambda kind: self._spent[kind])
        before = self._budget.spent
        outcome, offsets = self._variant(kind).run(self._budget, self._random)
        self._spent[kind] += self._budget.spent - before
        if outcome is PieceOutcome.EXHAUSTED and kind != _AS_IT_IS:  # this only proves that some joins were wrong
            outcome = PieceOutcome.LIMIT
            self._variants.pop(kind)
            if kind == _ALL:
                self._spent.pop(kind)
        return outcome, offsets

    def _variant(self, kind: int) -> SearchVariant:
        variant = self._variants.get(kind)
        if variant is None or (kind == _SOME and variant.runs >= thresholds.FORM_RUNS * luby(self._made - 2)):
            variant = self._variants[kind] = self._make(_CHANCES[self._made % len(_CHANCES)])
        return variant

    def _make(self, chance: float) -> SearchVariant:
        self._made += 1
        self._budget.spend(self._piece.arrays.n // _BUFFERS_PER_UNIT, 1)
        found = joined(self._piece, chance=chance, seed=int(self._random.integers(1 << 31)))
        return SearchVariant(found, self._table, self._made)
