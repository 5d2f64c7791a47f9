"""Feedback from a measured step to the next plan: the cost of copies, and when reloads start.

Measured execution, guided execution and the feedback on late swaps are Capuchin's (Peng et al., ASPLOS 2020).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from memplan.evict.costs import Link
from memplan.evict.measure import Leads, overlapped
from memplan.evict.policies import policy_name
from memplan.evict.workload import Events, Policy, Workload

_LEAST = 1e-9  # seconds: a lower limit for a measured copy


def started_earlier(policy: Policy, leads: Leads) -> Policy:
    """Return a policy with the decisions of `policy`, whose reloads start earlier by `leads` seconds."""

    def earlier(workload: Workload) -> Events:
        return overlapped(workload, policy(workload), leads)

    earlier.__name__ = policy_name(policy)
    earlier.func = policy  # type: ignore[attr-defined]  # as of a `partial`: what is asked of a policy is asked of it
    return earlier


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
