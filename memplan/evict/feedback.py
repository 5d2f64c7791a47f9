"""What a measured step changes in the next plan: what copies cost, and when reloads start (Capuchin's feedback).

The measured execution, its guided one and the feedback on late swaps are Capuchin's (Peng et al., ASPLOS 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from memplan.errors import BudgetInfeasible
from memplan.evict.costs import Link
from memplan.evict.events import Events
from memplan.evict.judge.arrays import measure
from memplan.evict.judge.overlap import Leads, come_early
from memplan.evict.workload import Policy, Workload

_LEAST = 1e-9  # seconds that anything takes


class Remembered:
    """A policy that remembers its last answer; `events` is None while it was not asked: nothing has to be evicted."""

    def __init__(self, policy: Policy, name: str, quick: Policy | None = None) -> None:
        self.policy = policy
        self.__name__ = name
        self.quick = quick or policy
        self.events: Events | None = None

    def __call__(self, workload: Workload) -> Events:
        """What the policy says."""
        self.events = self.policy(workload)
        return self.events


class Guided:
    """A policy that begins with the events that ran, their reloads `leads` earlier, and takes what is predicted to be
    fastest of them and what `policies` say.
    """

    def __init__(self, events: Events, leads: Leads, policies: Sequence[Policy] = ()) -> None:
        self._events, self._leads, self._policies = events, leads, policies

    def __call__(self, workload: Workload) -> Events:
        """Raises `BudgetInfeasible` where none of them keeps the budget."""
        ways = [come_early(workload, self._events, self._leads), self._events]
        ways += [policy(workload) for policy in self._policies]
        figures = [(measure(workload, way), way) for way in ways]
        kept = [(found.seconds, i) for i, (found, _) in enumerate(figures) if found.peak <= workload.budget]
        if not kept:
            raise BudgetInfeasible("what was measured needs more", op="", smallest=min(f.peak for f, _ in figures))
        return ways[min(kept)[1]]


def later(leads: Leads, late: Mapping[tuple[int, int], float]) -> dict[tuple[int, int], float]:
    """The leads with the seconds added by which reloads came too late."""
    return {key: leads.get(key, 0.0) + late.get(key, 0.0) for key in {**leads, **late}}


def link_of(samples: Sequence[tuple[int, float]]) -> Link | None:
    """Latency and bandwidth of a link from (bytes, seconds) of copies: least squares of the relative errors, of the
    medians by size, neither below 0; None of nothing.
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
    spread = sum(w * (n - mean_n) ** 2 for w, (n, _) in zip(weights, points, strict=True))
    together = sum(w * (n - mean_n) * (t - mean_t) for w, (n, t) in zip(weights, points, strict=True))
    slope = together / spread if spread else 0.0
    if slope <= 0 or mean_t < slope * mean_n:  # a line through the origin
        squares = sum(w * n * n for w, (n, _) in zip(weights, points, strict=True))
        slope = sum(w * n * t for w, (n, t) in zip(weights, points, strict=True)) / squares
        return Link(bytes_per_second=1 / slope, latency=0.0)
    return Link(bytes_per_second=1 / slope, latency=mean_t - slope * mean_n)
