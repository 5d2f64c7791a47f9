"""Steps 2 and 3 of the portfolio: alternates tree search on variants of one piece with ejection search.

The tree search (`search_variant.py`) alternates between the piece as it is, which is the only variant that proves
anything, the piece with all likely joins (`join.py`), and variants with most of them. The tree search finds tight
placements and proofs; the ejection search (`eject.py`) finds loose placements faster.
"""

from __future__ import annotations

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.instance import Instance, PieceOutcome
from memplan.solvers.arrays.problem_arrays import Ints
from memplan.solvers.limits import WorkBudget
from memplan.solvers.search.eject import Ejection, Learnt
from memplan.solvers.search.join import joined
from memplan.solvers.search.search_variant import RULES, SearchVariant, luby

_ALL, _AS_IT_IS, _SOME = 0, 1, 2  # kinds of variants, by the likely joins that are made
_CHANCES = (0.95, 0.9, 0.8)  # probabilities of a likely join in variants with some of them
_BUFFERS_PER_UNIT = 2  # buffers visited while a variant is made, for one unit of work


def search(piece: Instance, budget: WorkBudget, seed: int, learnt: Learnt | None = None) -> tuple[PieceOutcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be placed, or give up when `budget` is over.

    Tree search and ejection search get the same work. Ejection search starts after the first few runs if it can
    continue from `learnt`, and otherwise after a head start of the tree search. Returns the outcome and, if SOLVED, the
    offsets (units).
    """
    n = piece.arrays.n
    ejection = Ejection(piece, seed, learnt) if n <= thresholds.EJECTED else None
    runs = _Runs(piece, budget, seed)
    run, treed = 0, 0  # the tree search's runs and units of work
    ejected = thresholds.HEAD_START if learnt is None else 0  # units of work
    while not budget.is_over:
        before = budget.spent
        if ejection is not None and run >= len(RULES) and ejected < treed:
            if ejection.run(thresholds.TURNS, budget):
                return PieceOutcome.SOLVED, ejection.offsets
            ejected += budget.spent - before
            continue
        outcome, offsets = runs.next()
        if outcome is not PieceOutcome.LIMIT:
            return outcome, offsets
        treed += budget.spent - before
        run += 1
    return PieceOutcome.LIMIT, np.full(n, -1, np.int64)


class _Runs:
    """The runs of the tree search. The three kinds of variants get the same work.

    There is one variant with all likely joins and one with none. Of the third kind there are many, one after the other,
    each for a number of runs that follows Luby's sequence.
    """

    def __init__(self, piece: Instance, budget: WorkBudget, seed: int) -> None:
        self._piece, self._budget = piece, budget
        self._random = np.random.default_rng(seed)
        self._table = np.zeros(thresholds.TABLE, np.int64)
        self._made = 0  # variants
        self._variants = {_AS_IT_IS: self._make(0.0, guessed=False), _ALL: self._make(1.0, guessed=True)}
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
            variant = self._variants[kind] = self._make(_CHANCES[self._made % len(_CHANCES)], guessed=True)
        return variant

    def _make(self, chance: float, *, guessed: bool) -> SearchVariant:
        self._made += 1
        self._budget.spend(self._piece.arrays.n // _BUFFERS_PER_UNIT, 1)
        found = joined(self._piece, chance=chance, seed=int(self._random.integers(1 << 31)))
        return SearchVariant(found, self._table, self._made, guessed=guessed)
