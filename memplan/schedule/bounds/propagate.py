"""Edges that every order within a target keeps: found by two cuts per pair of ops, and added to the core.

If with u before v one of the two needs more than the target whatever else happens, then v comes before u in all
orders that are wanted. Each edge makes the cuts after it stronger and the search smaller; when neither u nor v
may come first, no order keeps within the target. (Edge finding, as in constraint-based scheduling.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints, step_bytes, with_edge
from memplan.schedule.bounds.cut import cut

_LARGEST = 32  # ops that touch the most: others hardly matter to each other
_MISPLACED = 4  # ops on the other side of a cut that are looked at
_NEAR = 32  # steps before and after a peak step whose ops might as well be on the other side of it


@dataclass(frozen=True, slots=True, kw_only=True)
class Propagated:
    """`core` with the edges that were found; None when no order keeps within the target."""

    core: GraphArrays | None
    left: int


def propagate(core: GraphArrays, order: Ints, target: int, work: int) -> Propagated:
    """Add the edges that every order of at most `target` bytes keeps, as far as `work` (arcs looked at) lasts.

    `order` is the best one known: first come the ops at which it needs more than the target.
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
    """Whether every order with `first` before `then` needs more than `target`; False too if they have no choice."""
    for op, before, after in ((then, first, -1), (first, -1, then)):
        found = cut(core, op, before=before, after=after)
        work -= found.work
        if found.bytes > target:
            return True, work
    return False, work


def _pairs(core: GraphArrays, order: Ints, target: int) -> Iterator[tuple[int, int]]:
    """Pairs that might run either way: an op at the peak with those that its cut would have on the other side, with
    those around it and with large ones; two large ones."""
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
    """Ops that run before step `at` and had better run after it, and the other way round; the largest of them."""
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
