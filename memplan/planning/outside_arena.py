"""Chooses storages to leave outside the arena, where the peak beside the arena comes at another time than its own.

An arena takes its bytes for the whole step. A storage outside takes bytes only while it is alive, so it costs nothing
where what is outside is below its own peak: before and after a convolution that needs much memory for itself.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from memplan.core.evictions import TRANSFERS
from memplan.core.graph import Value
from memplan.core.plan import Plan
from memplan.core.problem import Interval
from memplan.core.schedule import make_schedule, storage_intervals
from memplan.core.totals import beside_results
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions

_TRIES = 3  # fragmentation makes an arena larger than what is alive at once; each try leaves more outside


@dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """Storages that take the same bytes in place: `size` bytes in the arena, `nbytes` outside.

    `saved`: the bytes of a copy that the first op needs only where its result, which it returns in fresh memory, has a
    place in the arena.
    """

    storages: frozenset[int]
    size: int
    nbytes: int
    live: Interval
    saved: int


class _Profile:
    """The bytes in the arena and outside at each step, while storages leave and enter; the last entry is the time after
    the step."""

    def __init__(self, plan: Plan) -> None:
        self.inside = np.zeros(len(plan.schedule.order) + 1, np.int64)
        kept = plan.outside["outputs"] + plan.outside["gradients"]
        self.outside = np.array((*plan.outside_profile, kept), np.int64)
        for buffer in plan.problem.buffers:
            self.inside[buffer.live.start : buffer.live.end] += buffer.size
        self._rest = plan.total - plan.arena_size - max(plan.outside_profile, default=0)

    @property
    def total(self) -> int:
        """The bytes of the whole step, with an arena that is not fragmented."""
        return int(self.inside.max(initial=0)) + int(self.outside.max(initial=0)) + self._rest

    def raised(self, candidate: _Candidate) -> int:
        """Return the peak of what is outside, with a candidate that is in the arena now."""
        first, later = np.split(self.outside[candidate.live.start : candidate.live.end] + candidate.nbytes, [1])
        return max(int(later.max(initial=0)), int(first[0]) - candidate.saved, int(self.outside.max()))

    def move(self, candidate: _Candidate, *, out: bool) -> None:
        """Move a candidate out of the arena, or back."""
        sign, live = (1 if out else -1), candidate.live
        self.inside[live.start : live.end] -= sign * candidate.size
        self.outside[live.start : live.end] += sign * candidate.nbytes
        self.outside[live.start] -= sign * candidate.saved


def plan_partly_outside(plan: Plan, limit: int, options: PlanOptions, *, saved: bool = False) -> Plan | None:
    """Return a plan in the same order with some storages outside, whose total is at most `limit`, or else the smallest
    that is found; None if none is smaller than `plan`.

    Its `temporaries` are those that are expected where results in fresh memory are no longer copied.

    Args:
        plan: A plan on one device. Temporaries that are not measured are left out.
        limit: The largest total, in bytes.
        options: Those of the solver, and `gradients`: with "arena", those of parameters may leave the arena.
        saved: Activations that the backward needs may leave the arena.
    """
    best, aim = plan, limit
    candidates = list(_candidates(plan, gradients=options.gradients == "arena", saved=saved))
    for _ in range(_TRIES):
        made = _without(plan, _chosen(plan, candidates, aim), options)
        best = min(best, made, key=lambda p: p.on_device)
        above = made.on_device - limit
        if above <= 0:
            break
        aim -= above
    return None if best is plan else best


def plan_without_copies(plan: Plan, options: PlanOptions, *, saved: bool) -> Plan | None:
    """Return a plan in the same order in which results that kernels return in fresh memory are used where they are, if
    the total is the same without their copies in the arena; None if nothing leaves it. `saved`: as above.

    On an accelerator a copy is a launch, which takes the host longer than most copies take the device.
    """
    profile, chosen = _Profile(plan), list[_Candidate]()
    total = profile.total
    for candidate in _candidates(plan, gradients=False, saved=saved):
        if candidate.saved:
            profile.move(candidate, out=True)
            if profile.total <= total:
                chosen.append(candidate)
            else:
                profile.move(candidate, out=False)
    made = _without(plan, chosen, options) if chosen else plan
    return made if chosen and made.on_device <= plan.on_device else None


def _without(plan: Plan, chosen: Sequence[_Candidate], options: PlanOptions) -> Plan:
    """Return the plan of the same order with the chosen storages outside."""
    order, temporaries = plan.schedule.order, list(plan.transient)
    for c in chosen:
        temporaries[order[c.live.start]] -= c.saved
    graph = plan.graph.with_outside(frozenset().union(*(c.storages for c in chosen)))
    schedule = make_schedule(graph, order, plan.schedule.policy)
    made = make_plan(replace(ScheduledGraph.of(plan), graph=graph, schedule=schedule), options)
    kept = plan.eviction
    return replace(
        made,
        eviction=None if kept is None else replace(kept, arena_budget=made.arena_size),
        temporaries=None if plan.temporaries is None else tuple(temporaries),
        division=plan.division,
        compress=plan.compress,
        kernels=plan.kernels,
    )


def _chosen(plan: Plan, candidates: Sequence[_Candidate], limit: int) -> list[_Candidate]:
    """Return which candidates leave the arena for a total of at most `limit`, or else for the smallest one found.

    One after another leaves, of those alive where the arena is fullest: the one that raises the peak of what is outside
    the least, or, in a second attempt, by the least in comparison with what it frees.
    """
    found = _leave(_Profile(plan), candidates, limit, _raises_least)
    if found[0] > limit:
        found = min(found, _leave(_Profile(plan), candidates, limit, _frees_most), key=lambda pair: pair[0])
    return found[1]


_Preference = Callable[[_Candidate, int, int], tuple[int, ...]]  # the arguments of `_raises_least`; the least leaves


def _next(profile: _Profile, left: Sequence[_Candidate], prefer: _Preference) -> _Candidate | None:
    """Return which candidate leaves next, of those alive where the arena is fullest; None if there is none."""
    fullest, peak = int(profile.inside.argmax()), int(profile.outside.max())
    here = (c for c in left if c.live.is_alive_at_step(fullest))
    return min(here, key=lambda c: prefer(c, profile.raised(c), peak), default=None)


def _raises_least(candidate: _Candidate, raised: int, peak: int) -> tuple[int, ...]:
    """Return the key of a candidate; `raised` is the peak of what is outside with it, `peak` that without it."""
    return raised, -candidate.size, candidate.live.start


def _frees_most(candidate: _Candidate, raised: int, peak: int) -> tuple[int, ...]:
    return raised - peak - candidate.size, raised, candidate.live.start


def _leave(
    profile: _Profile, candidates: Sequence[_Candidate], limit: int, prefer: _Preference
) -> tuple[int, list[_Candidate]]:
    """Return the total and the candidates that leave the arena; those that need not have left return, largest first."""
    chosen, left = list[_Candidate](), list(candidates)
    least, needed = profile.total, 0
    while least > limit and left:
        best = _next(profile, left, prefer)
        if best is None:
            break
        left.remove(best)
        chosen.append(best)
        profile.move(best, out=True)
        if profile.total < least:
            least, needed = profile.total, len(chosen)
    for candidate in chosen[needed:]:
        profile.move(candidate, out=False)
    kept = chosen[:needed]
    for candidate in sorted(kept, key=lambda c: (-c.size, c.live.start)):
        profile.move(candidate, out=False)
        if profile.total <= max(limit, least):
            kept.remove(candidate)
        else:
            profile.move(candidate, out=True)
    return least, kept


def _candidates(plan: Plan, *, gradients: bool, saved: bool) -> Iterator[_Candidate]:
    """Yield what may leave the arena: intermediate results (without `saved`, those that live within one phase), and
    gradients of parameters.

    What is copied to the host or from there stays. Gradients live on after the step.
    """
    graph, order = plan.graph, plan.schedule.order
    beside = beside_results(graph, plan.transient)
    copied = {s for op in graph.ops if op.target in TRANSFERS for s in graph.touched(op)}
    members, values = defaultdict[int, set[int]](set), defaultdict[int, list[Value]](list)
    for value, where in zip(graph.values, plan.placed.values, strict=True):
        members[where.storage].add(value.storage)
        values[where.storage].append(value)
    returned = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    sizes = {buffer.id: buffer.size for buffer in plan.problem.buffers}
    for storage, live in storage_intervals(graph, order).items():
        name, nbytes = graph.storages[storage].name, graph.storages[storage].nbytes
        if name not in sizes or not _is_spanned(values[storage]) or not members[storage].isdisjoint(copied):
            continue
        within = saved or live.end <= graph.forward_ops or live.start >= graph.forward_ops
        inner = members[storage].isdisjoint(returned)
        if (inner and within) or (gradients and storage in graph.gradients_in_arena):
            first = order[live.start]
            fresh = 0 if graph.ops[first].direct else min(nbytes, plan.transient[first] - beside[first])
            lived = live if inner else replace(live, end=len(order) + 1)
            yield _Candidate(
                storages=frozenset(members[storage]), size=sizes[name], nbytes=nbytes, live=lived, saved=fresh
            )


def _is_spanned(values: Sequence[Value]) -> bool:
    """Return whether the first of the values over the same bytes covers all of them, so that one tensor can hold it."""
    whole, *rest = values
    if whole.offset or not whole.dense:
        return False
    ends = (v.offset + sum((n - 1) * stride for n, stride in zip(v.shape, v.strides, strict=True)) for v in rest)
    return all(v.dtype == whole.dtype for v in rest) and max(ends, default=0) < math.prod(whole.shape)
