"""Host-resident storages: they belong to the model or the caller, live on the host, and are loaded into the arena.

Policies that never move them run through `with_host_resident_kept`.
"""

from __future__ import annotations

from dataclasses import replace

from memplan.core.graph import Graph
from memplan.evict.events import Events
from memplan.evict.workload import Policy, Workload


def host_resident_storages(graph: Graph) -> frozenset[int]:
    """Return every storage that the model or the caller owns; all are host-resident when the step runs elsewhere."""
    return frozenset(i for i, s in enumerate(graph.storages) if not s.planned)


def with_host_resident_kept(workload: Workload, policy: Policy) -> Events:
    """Return the events of `policy` when the host-resident storages stay on the device for the whole step.

    The policy sees none of them, and its budget is what they leave of the workload's. Raises what `policy` raises.
    """
    if not workload.host_resident:
        return policy(workload)
    kept = sum(workload.size[s] for s in workload.host_resident if workload.uses[s])
    return workload.around(policy(replace(workload, host_resident=frozenset(), budget=workload.budget - kept)))
