"""Search over shares of classes of similar storages, for steps with so many ops that single decisions take too long.

A model repeats its blocks, so most storages have a twin in every other block. A class of twins gets one decision, and
only the class that reaches the budget is divided: its first or its last members get the decision, as few as are needed,
which bisection finds. The number of measurements grows with the number of different ops of a block, and with the
logarithm of the number of blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from memplan.evict.search.decisions import PIN, UNDECIDED, Decisions, DecisionSearch, Move
from memplan.evict.search.descent import Option, class_of, descending

_ROUNDS = 3  # of taking back what the budget does not need


def descend_shares(
    search: DecisionSearch, state: Decisions, exponent: float, classes: Sequence[Sequence[Option]]
) -> Decisions | None:
    """Return a state within the budget, by a descent over `classes` (see `storage_classes`); None if none is found.

    Of the class that reaches the budget, as few members as possible are taken.
    """
    options = [option for choices in classes for option in choices]
    for after, index in descending(search, state, options, exponent):
        if after.area == 0:
            return _fewest(search, state, after, options[index])
        state = after
    return state if state.area == 0 else None


def trimmed_shares(search: DecisionSearch, state: Decisions) -> Decisions:
    """Return the state without the decisions that the budget does not need, by classes of storages.

    The most expensive classes are tried first. Storages that would be recomputed although there is room for them are
    kept instead. The result keeps the budget, as `state` does, and takes no more time.
    """
    for _ in range(_ROUNDS):
        before = state.seconds
        for group in _pins(search):
            undecided = [move for move in group if state.decision[move.storage] == UNDECIDED]
            state = _most(search, state, undecided, lambda a, b: a.seconds < b.seconds)
        groups = _taken(search, state)
        kept = [search.after(state, *group).seconds for group in groups]
        for _, group in sorted(zip(kept, groups, strict=True), key=lambda one: one[0]):
            state = _most(search, state, group, lambda a, b: a.seconds <= b.seconds)
        if state.seconds >= before:
            break
    return state


def parts_of(classes: Sequence[Sequence[Option]], count: int) -> tuple[tuple[Option, ...], ...]:
    """Return the choices for runs of neighbours in each class, which is divided into `count` runs or its members."""
    found = []
    for options in classes:
        most = min(count, max(map(len, options)))
        for k in range(most):
            parts = (option[len(option) * k // most : len(option) * (k + 1) // most] for option in options)
            found.append(tuple(filter(None, parts)))
    return tuple(filter(None, found))


def _pins(search: DecisionSearch) -> list[list[Move]]:
    """Return the moves that keep a storage for good, by class."""
    found: dict[tuple[object, ...], list[Move]] = {}
    for moves in search.moves:
        if moves[-1].decision == PIN:
            found.setdefault(class_of(search, moves[-1].storage), []).append(moves[-1])
    return list(found.values())


def _taken(search: DecisionSearch, state: Decisions) -> list[list[Move]]:
    """Return the moves that take back the decisions of `state`, those of equal decisions on one class together."""
    found: dict[tuple[object, ...], list[Move]] = {}
    for s in np.flatnonzero(state.decision != UNDECIDED).tolist():
        group = (int(state.decision[s]), *class_of(search, s))
        found.setdefault(group, []).append(Move(s, UNDECIDED, -1))
    return list(found.values())


def _fewest(search: DecisionSearch, state: Decisions, whole: Decisions, option: Option) -> Decisions:
    """Return the state after as few of the moves of `option` as keep the budget; `whole` is the one after all of them.

    They are the first or the last moves, whichever take less time.
    """
    left = [move for move in option if state.decision[move.storage] != move.decision]
    best = whole
    for moves in (left, left[::-1]):
        low, high, found = 0, len(moves), whole
        while high - low > 1:
            middle = (low + high) // 2
            after = search.after(state, *moves[:middle])
            low, high, found = (low, middle, after) if after.area == 0 else (middle, high, found)
        best = min(best, found, key=lambda d: d.seconds)
    return best


def _most(
    search: DecisionSearch, state: Decisions, moves: Sequence[Move], better: Callable[[Decisions, Decisions], bool]
) -> Decisions:
    """Return the state within the budget after as many of the moves as possible, if it is `better` than `state`.

    They are the first or the last moves, whichever take less time.
    """
    if not moves:
        return state
    whole = search.after(state, *moves)
    if whole.area == 0:
        return whole if better(whole, state) else state
    best = state
    for some in (moves, moves[::-1]) if len(moves) > 1 else ():
        low, high, found = 0, len(moves), state
        while high - low > 1:
            middle = (low + high) // 2
            after = search.after(state, *some[:middle])
            low, high, found = (middle, high, after) if after.area == 0 else (low, middle, found)
        if found is not state and better(found, best):
            best = found
    return best
