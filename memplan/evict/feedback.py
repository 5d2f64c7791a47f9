"""Feedback from a measured step to the next plan: the cost of copies, and when reloads start.

Measured execution, guided execution and the feedback on late swaps are Capuchin's (Peng et al., ASPLOS 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from memplan.core.graph import Op
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link
from memplan.evict.measure import Leads, measure, overlapped
from memplan.evict.workload import Events, Kind, Policy, Workload

_Runs = tuple[tuple[int, str], ...]  # the source and the target of each op that runs, in order
_LEAST = 1e-9  # seconds: a lower limit for a measured copy


class RecordingPolicy:
    """A policy that remembers its answers; `events` is the one that a plan was made of, once `settle` was told which.

    Where several variants of a step are planned, it is asked for each.
    """

    def __init__(self, policy: Policy, name: str, quick: Policy | None = None) -> None:
        self.policy = policy
        self.__name__ = name
        self.quick = quick or policy
        self.events: Events | None = None
        self._answers: list[tuple[_Runs, Events]] = []

    def __call__(self, workload: Workload) -> Events:
        """Return the policy's events for `workload`, and remember them."""
        events = self.policy(workload)
        ops = workload.graph.ops
        runs = ((workload.sources[i], ops[i].target) for kind, i in events if kind is Kind.RUN)
        self._answers.append((tuple(run for run in runs if run[0] >= 0), events))
        return events

    def settle(self, sources: Sequence[int], ops: Sequence[Op]) -> None:
        """Set `events` to the last answer that runs the ops of a plan, and forget the others.

        They are None for a plan that no policy was asked for, because nothing has to be evicted.

        Args:
            sources: Those of the plan (`EvictionPlan.sources`).
            ops: The ops of its graph.
        """
        ran = tuple((source, op.target) for source, op in zip(sources, ops, strict=True) if source >= 0)
        self.events = next((events for runs, events in reversed(self._answers) if runs == ran), None)
        self._answers.clear()


class ProfileGuidedPolicy:
    """A policy that improves the events that ran (profile-guided).

    It compares these events, the same with their reloads started earlier by `leads` seconds, and the answers of
    `policies`, and takes the one with the least predicted time.
    """

    def __init__(self, events: Events, leads: Leads, policies: Sequence[Policy] = ()) -> None:
        self._events, self._leads, self._policies = events, leads, policies

    def __call__(self, workload: Workload) -> Events:
        """Return the fastest candidate within the budget. Raises `BudgetInfeasible` if none keeps it.

        It raises, too, if the events that ran are those of another workload: with, or without, saved generator states.
        """
        if len({i for kind, i in self._events if kind is Kind.RUN}) != len(workload.graph.ops):
            raise BudgetInfeasible("the events that ran are those of another workload", op="", smallest=0)
        ways = [overlapped(workload, self._events, self._leads), self._events]
        ways += [policy(workload) for policy in self._policies]
        figures = [(measure(workload, way), way) for way in ways]
        kept = [(found.seconds, i) for i, (found, _) in enumerate(figures) if found.peak <= workload.budget]
        if not kept:
            what = "no candidate of the profile-guided policy keeps the budget"
            raise BudgetInfeasible(what, op="", smallest=min(f.peak for f, _ in figures))
        return ways[min(kept)[1]]


def with_lateness(leads: Leads, late: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """Return `leads` plus the seconds by which each reload was late."""
    return {key: leads.get(key, 0.0) + late.get(key, 0.0) for key in {**leads, **late}}


def link_of(samples: Sequence[tuple[int, float]]) -> Link | None:
    """Return the link whose latency and bandwidth fit measured copies, given as (bytes, seconds); None without copies.

    The fit minimizes the squared relative errors of the median times by size; neither parameter is negative.
    """
    by_size: dict[int, list[float]] = {}
    for nbytes, seconds in samples:
        if nbytes:
            by_size.setdefault(nbytes, []).append(max(seconds, _LEAST))
    points = [(float(nbytes), median(found)) for nbytes, found in by_size.items()]
    if not points:
        return None
    weights = [1 / t**2 for _, t in points]
    mean_n, mean_t = (sum(w * p[k] for w, p in zip(weights, points, strict=True)) / sum(weights) for k in (0, 1))
    variance = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    covariance = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
    slope = covariance / variance if variance else 0.0
    if slope <= 0 or mean_t < slope * mean_n:  # a line through the origin
        squares = sum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
        slope = sum(w * n * t for w, (n, t) in zip(weights, points, strict=True)) / squares
        return Link(bytes_per_second=1 / slope, latency=0.0)
    return Link(bytes_per_second=1 / slope, latency=mean_t - slope * mean_n)
