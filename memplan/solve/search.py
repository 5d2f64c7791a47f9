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
from memplan.solve.join import Joined, joined

# Rules for the section: how few candidates make it urgent, and whether buffers that fit a corner come first.
_RULES = ((3, True), (4, True), (5, False), (1, False))
_TABLE = 1 << 18  # remembered states
_NOISES = (0.05, 0.3)  # of the logarithm of a key
_FIRST_NODES, _SLICE_NODES, _LEAST_NODES = 2, 1, 100  # per buffer, per buffer, at least
_THOROUGH_NODES = 3  # nodes that take as long as one after which all conclusions are drawn
_TURNS = 1_000  # of the ejection search, in one go
_ALL, _AS_IT_IS, _SOME = 0, 1, 2  # of the likely joins: kinds of forms
_NEVER = 1 << 60
_FORM_RUNS = 10  # on a form with joined buffers, before another one is made
_CHANCES = (0.95, 0.9, 0.8)  # how many of the buffers are joined that could be
_JOINED_PER_UNIT = 4  # buffers, for one unit of work
_HEAD_START = 500_000  # units of work that the tree search alone gets at first, where capacities may be tight


class Outcome(enum.Enum):
    """What a search says about a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()


def search(piece: Instance, budget: Budget, seed: int, learnt: Learnt | None = None) -> tuple[Outcome, Ints]:
    """Place the piece under its capacity, prove that it cannot be done, or give up when `budget` is over.

    Ejection search (`eject.py`) gets as much work: from the first few runs on if it has `learnt` to go on from,
    else after a head start, in which the tree finds what it can find.
    Returns the outcome and, if SOLVED, the offsets (units).
    """
    n = piece.core.n
    ejection = Ejection(piece, seed, learnt) if n <= MOST else None
    runs = _Runs(piece, budget, seed)
    run, treed = 0, 0  # of the tree search: runs, units of work
    ejected = _HEAD_START if learnt is None else 0  # units of work
    while not budget.is_over:
        before = budget.spent
        if ejection is not None and run >= len(_RULES) and ejected < treed:
            if ejection.run(_TURNS, budget):
                return Outcome.SOLVED, ejection.offsets
            ejected += budget.spent - before
            continue
        outcome, offsets = runs.next()
        if outcome is not Outcome.LIMIT:
            return outcome, offsets
        treed += budget.spent - before
        run += 1
    return Outcome.LIMIT, np.zeros(n, np.int64)


class _Runs:
    """The runs of the tree search on one piece: as it is, with all likely joins, and with some of them.

    The three share the work equally; the last kind is another form every so often, at intervals after Luby et al.
    """

    def __init__(self, piece: Instance, budget: Budget, seed: int) -> None:
        self._piece, self._budget = piece, budget
        self._random = np.random.default_rng(seed)
        self._table = np.zeros(_TABLE, np.int64)
        self._made = 0  # forms
        self._forms: list[_Form | None] = [None, None, None]  # by kind
        self._spent = [0, 0, 0]  # units of work, by kind

    def next(self) -> tuple[Outcome, Ints]:
        """One run, of the kind that had least work so far."""
        kind = int(np.argmin(self._spent))
        before = self._budget.spent
        form = self._form(kind)
        outcome, offsets = form.run(self._budget, self._random)
        if outcome is Outcome.SOLVED:
            offsets = form.joined.expand(offsets)
        elif outcome is Outcome.EXHAUSTED and kind != _AS_IT_IS:
            outcome, self._forms[_SOME] = Outcome.LIMIT, None
            if kind == _ALL:
                self._spent[_ALL] = _NEVER
        self._spent[kind] += max(1, self._budget.spent - before)
        return outcome, offsets

    def _form(self, kind: int) -> _Form:
        form = self._forms[kind]
        if form is None or (kind == _SOME and form.runs >= _FORM_RUNS * _luby(max(1, self._made - 2))):
            chance = {_AS_IT_IS: 0.0, _ALL: 1.0, _SOME: _CHANCES[self._made % len(_CHANCES)]}[kind]
            self._made += 1
            self._budget.spend(self._piece.core.n // _JOINED_PER_UNIT, 1)
            found = joined(self._piece, chance=chance, seed=int(self._random.integers(1 << 31)))
            form = self._forms[kind] = _Form(found, self._table, self._made, guessed=kind != _AS_IT_IS)
        return form


class _Form:
    """A piece, perhaps with buffers joined, and what is known of the arms on it."""

    def __init__(self, joined: Joined, table: Ints, salt: int, *, guessed: bool) -> None:
        self.joined, self.runs = joined, 0
        self._table, self._salt, self._guessed = table, salt, guessed
        self._keys = _rankings(joined.piece.core)
        self._arms = [(key, rule) for key in range(len(self._keys)) for rule in _RULES]
        self._left = np.full(len(self._arms), np.inf)

    def run(self, budget: Budget, random: np.random.Generator) -> tuple[Outcome, Ints]:
        """The next arm, briefly; after all of them an arm that left little unplaced, with a perturbed ranking."""
        run, arms, n = self.runs, len(self._arms), self.joined.piece.core.n
        self.runs += 1
        if run < arms:
            arm, nodes, key = run, _FIRST_NODES * n, self._keys[self._arms[run][0]]
        else:
            by_score = np.argsort(self._left, kind="stable")
            arm = int(by_score[min(int(random.exponential(arms / 3)), arms - 1)])
            nodes = _SLICE_NODES * n * _luby(run - arms + 1)
            noise = _NOISES[int(random.integers(2))]
            key = self._keys[self._arms[arm][0]] * np.exp(random.normal(0.0, noise, n))
        thorough = run % 2 == 0 and run >= len(_RULES) and (run < arms or self._guessed)
        outcome, area, offsets = self._search(key, self._arms[arm][1], thorough, max(nodes, _LEAST_NODES), budget)
        self._left[arm] = min(self._left[arm], area)
        return outcome, offsets

    def _search(
        self, key: npt.NDArray[np.float64], rule: tuple[int, bool], thorough: bool, nodes: int, budget: Budget
    ) -> tuple[Outcome, int, Ints]:
        from memplan.solve import search_kernel as kernel

        piece, core, cost = self.joined.piece, self.joined.piece.core, _THOROUGH_NODES if thorough else 1
        rank = np.empty(core.n, np.int64)
        rank[np.argsort(-key, kind="stable")] = np.arange(core.n)
        capacity, offsets = int((piece.max_offset + core.size).max()), np.zeros(core.n, np.int64)
        status, spent, area = kernel.search(
            capacity, core.size, core.align, core.low, piece.max_offset, core.seg_ptr, core.seg_lo, core.seg_hi,
            core.sections, piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, rank, *rule, thorough,
            budget.nodes(nodes * cost, core.n) // cost + 1, self._table, self._salt, offsets,
        )  # fmt: skip
        budget.spend(spent * cost, core.n)
        outcome = {kernel.SOLVED: Outcome.SOLVED, kernel.EXHAUSTED: Outcome.EXHAUSTED}.get(status, Outcome.LIMIT)
        return outcome, area, offsets


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
