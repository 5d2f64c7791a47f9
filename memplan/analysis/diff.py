"""Compares two plans: their totals, and the buffers that were added, removed, resized or moved to the peak.

Buffers are matched by module (without layer numbers), op and kind, not by name: names shift when anything before them
changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest

from memplan.analysis.buffers import Holder, largest
from memplan.analysis.rows import Figures, Growth, figures_of, growths, key_of
from memplan.core.arguments import LOAD, require_kind
from memplan.core.plan import Plan

Pair = tuple[Holder, Holder]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diff:
    """The differences between plan `before` and plan `after`; every tuple has the largest change first.

    `came` are buffers of `after` only, `went` of `before` only; `grew` and `shrank` have another size; `to_peak` and
    `off_peak` are alive at the peak of one plan only. `rows` are the rows of buffers at the peak that differ: their
    deltas, in bytes, add up to the difference of max live. `same_graph`: the plans differ in order and layout only;
    otherwise `first_difference` says where the graphs differ first.
    """

    before: Figures
    after: Figures
    names: tuple[str, str]
    same_graph: bool
    first_difference: str
    came: tuple[Holder, ...]
    went: tuple[Holder, ...]
    grew: tuple[Pair, ...]
    shrank: tuple[Pair, ...]
    to_peak: tuple[Pair, ...]
    off_peak: tuple[Pair, ...]
    rows: tuple[Growth, ...]

    @property
    def same(self) -> bool:
        """Whether no figure and no buffer differs."""
        changes = (self.came, self.went, self.grew, self.shrank, self.to_peak, self.off_peak)
        return not any(changes) and self.before == self.after


def diff(before: Plan, after: Plan) -> Diff:
    """Compare two plans, of one model or of two versions of it.

    Args:
        before: The plan to compare with.
        after: The plan that may have changed.

    Returns:
        The differences; `.same` is True when there are none. All sizes are bytes.

    Example:
        >>> changes = memplan.diff(memplan.load("old.json"), memplan.load("plan.json"))
        >>> grown = changes.after.arena - changes.before.arena  # bytes
    """
    for plan in (before, after):
        require_kind(plan, Plan, "diff", LOAD)
    pairs, went, came = matched(largest(before), largest(after))
    old, new = figures_of(before), figures_of(after)
    first = _first_difference(before, after)
    at_old, at_new = ({b.id for b in p.problem.alive_at(p.problem.peak_step)} for p in (before, after))
    return Diff(
        before=old,
        after=new,
        names=(before.model, after.model),
        same_graph=not first,
        first_difference=first,
        came=came,
        went=went,
        grew=_ordered((a, b) for a, b in pairs if b.size > a.size),
        shrank=_ordered((a, b) for a, b in pairs if b.size < a.size),
        to_peak=_ordered(((a, b) for a, b in pairs if b.id in at_new and a.id not in at_old), by_size=True),
        off_peak=_ordered(((a, b) for a, b in pairs if b.id not in at_new and a.id in at_old), by_size=True),
        rows=growths(old.peak, new.peak),
    )


def _ordered(pairs: Iterable[Pair], *, by_size: bool = False) -> tuple[Pair, ...]:
    """Return pairs by their change, or by their size now, the largest first."""
    return tuple(sorted(pairs, key=lambda p: -p[1].size if by_size else -abs(p[1].size - p[0].size)))


def _first_difference(before: Plan, after: Plan) -> str:
    """Return what makes the graphs differ: their budgets, else the first differing line of their signatures."""
    if before.fingerprint == after.fingerprint:
        return ""
    one, two = (_budget(plan) for plan in (before, after))
    if one != two:
        return f"{one} before, {two} after; what is computed again or copied are ops of the graph"
    for old, new in zip_longest(before.graph.signature(), after.graph.signature(), fillvalue="nothing more"):
        if old != new:
            return f"{old} before, {new} after"
    return ""


def _budget(plan: Plan) -> str:
    if (kept := plan.eviction) is None:
        return "no budget"
    counts = f"{len(plan.evictions)} eviction{'' if len(plan.evictions) == 1 else 's'}"
    asked = f"an arena budget of {kept.arena_budget:,} B" if kept.budget is None else f"a budget of {kept.budget:,} B"
    return f"{asked} kept by {kept.policy!r} with {counts}"


def matched(
    before: Iterable[Holder], after: Iterable[Holder]
) -> tuple[list[Pair], tuple[Holder, ...], tuple[Holder, ...]]:
    """Return (pairs of matching buffers, buffers of `before` only, buffers of `after` only)."""
    pairs, left, right = list[Pair](), *(sorted(holders, key=lambda h: h.start) for holders in (before, after))
    # The closest matches first: same layer and size, then same size, then the rest by first step.
    keys: tuple[Callable[[Holder], object], ...] = (lambda h: (h.module, h.size), lambda h: h.size, lambda h: 0)
    for key in keys:
        waiting = defaultdict[object, list[Holder]](list)
        for holder in reversed(right):
            waiting[key_of(holder), key(holder)].append(holder)
        found = [(h, same.pop()) for h in left if (same := waiting[key_of(h), key(h)])]
        gone, taken = {a.id for a, _ in found}, {b.id for _, b in found}
        left, right = [h for h in left if h.id not in gone], [h for h in right if h.id not in taken]
        pairs += found
    went, came = (tuple(sorted(holders, key=lambda h: -h.size)) for holders in (left, right))
    return pairs, went, came
