"""Streamed storages: which they are, and how policies that move none do without moving them."""

from __future__ import annotations

from dataclasses import replace

from memplan.core.graph import Graph
from memplan.evict.events import Events
from memplan.evict.workload import Policy, Workload


def all_streamed(graph: Graph) -> frozenset[int]:
    """Every storage that the model or the caller holds: all of them live on the host when the step runs elsewhere."""
    return frozenset(i for i, s in enumerate(graph.storages) if not s.planned)


def with_streamed_kept(workload: Workload, policy: Policy) -> Events:
    """What `policy` makes of `workload` when the streamed storages stay on the device throughout.

    It sees none of them, and a budget of what they leave. Raises what `policy` raises.
    """
    if not workload.streamed:
        return policy(workload)
    kept = sum(workload.size[s] for s in workload.streamed if workload.uses[s])
    return workload.around(policy(replace(workload, streamed=frozenset(), budget=workload.budget - kept)))
