"""Finds edges that hold in every order within a target, by two cuts per pair of ops (edge finding, as in
constraint-based scheduling).

If every order with u before v needs more than the target at u or at v, then v runs before u in all orders within the
target. Each new edge makes later cuts stronger and the search smaller. If neither u nor v may run first, no order is
within the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, step_bytes, with_edge
from memplan.schedule.bounds.cut import cut

_LARGEST = 32  # the ops with the largest working sets: pairs of other ops rarely give an edge
_MISPLACED = 4  # ops on the other side of a cut that are tried
_NEAR = 32  # steps before and after a peak step whose ops are tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """The result of a propagation: `core` has the edges that were found, and is None if no order is within the target.

    `left` is the work that is left, in arcs.
    """

    core: GraphArrays | None
    left: int


def propagate(core: GraphArrays, order: Ints, target: int, work: int) -> Propagated:
    """Add edges that hold in every order of at most `target` bytes, until `work` (arcs visited) is spent.

    `order` is the best order known: the ops at which it needs more than the target are tried first.
    """
    changed = True
    while changed and work > 0:
        changed = False
        for one, two in _pairs(core, order, target):
            if work <= 0:
                break
            work -= core.n + len(core.pred)
            if _related(core, one)[two]:
                continue
            excluded = []
            for first, then in ((one, two), (two, one)):
                found, work = _excluded(core, first, then, target, work)
                excluded.append(found)
            if all(excluded):
                return Propagated(core=None, left=work)
            if any(excluded):
                core = with_edge(core, two, one) if excluded[0] else with_edge(core, one, two)
                changed = True
    return Propagated(core=core, left=work)


def _excluded(core: GraphArrays, first: int, then: int, target: int, work: int) -> tuple[bool, int]:
    """Return whether every order with `first` before `then` is proven to need more than `target`, and the work left."""
    for op, before, after in ((then, first, -1), (first, -1, then)):
        found = cut(core, op, before=before, after=after)
        work -= found.work
        if found.bytes > target:
            return True, work
    return False, work


def _pairs(core: GraphArrays, order: Ints, target: int) -> Iterator[tuple[int, int]]:
    """Yield pairs of ops to try: an op at the peak with ops that its cut has on the other side, with ops near it and
    with large ops; and two large ops.
    """
    large = np.argsort(-core.working_set, kind="stable")[:_LARGEST].tolist()
    seen: set[tuple[int, int]] = set()
    near = np.flatnonzero(step_bytes(core, order) > target)[:_LARGEST]
    groups = [(order[at], _misplaced(core, order, int(at))) for at in near]
    groups += [(order[at], [*order[max(at - _NEAR, 0) : at + _NEAR].tolist(), *large]) for at in near]
    groups += [(one, large) for one in large]
    for one, others in groups:
        for two in others:
            pair = (min(int(one), two), max(int(one), two))
            if one != two and pair not in seen:
                seen.add(pair)
                yield pair


def _misplaced(core: GraphArrays, order: Ints, at: int) -> list[int]:
    """Return the largest ops that `order` has on the other side of step `at` than the minimum cut there has."""
    ran = np.zeros(core.n, np.bool_)
    ran[order[:at]] = True
    other = np.flatnonzero(cut(core, int(order[at])).ideal != ran)
    found: list[int] = other[np.argsort(-core.working_set[other], kind="stable")][:_MISPLACED].tolist()
    return found


def _related(core: GraphArrays, op: int) -> Ints:
    """Nonzero for `op` and all ops that must run before or after it."""
    from memplan.schedule.bounds.cut_kernel import sides_of

    found: Ints = sides_of(core.n, op, -1, -1, core.pred_ptr, core.pred, core.succ_ptr, core.succ)
    return found
