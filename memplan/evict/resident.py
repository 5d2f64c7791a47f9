"""Streamed storages under policies that move none: loaded before the step, written back after it."""

from __future__ import annotations

from dataclasses import replace

from memplan.evict.events import Events, Kind
from memplan.evict.workload import Policy, Workload


def with_streamed_kept(workload: Workload, policy: Policy) -> Events:
    """What `policy` makes of `workload` when the streamed storages stay on the device throughout.

    It sees none of them, and a budget of what they leave. Raises what `policy` raises.
    """
    if not workload.streamed:
        return policy(workload)
    kept = sum(workload.size[s] for s in workload.streamed if workload.uses[s])
    events = policy(replace(workload, streamed=frozenset(), budget=workload.budget - kept))
    plain = workload.plain
    arrive = (e for e in plain if e.kind in (Kind.RELOAD, Kind.RELOADED))
    leave = (e for e in plain if e.kind in (Kind.OFFLOAD, Kind.OFFLOADED))
    return (*arrive, *events, *leave)
