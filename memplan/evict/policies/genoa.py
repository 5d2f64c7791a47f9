"""`genoa`: reloads each operand right before its op and offloads it right after (torch.TensorRef's policy).

It is the slowest policy and has the smallest peak: no plan needs less than one op's operands and results. Budgets are
compared with it; `flow` keeps what fits instead.
"""

from __future__ import annotations

from memplan.evict.workload import Event, Events, Kind, Workload, require_floor


def genoa(workload: Workload) -> Events:
    """Return events whose peak is the floor of `workload`. Raises `BudgetInfeasible` for a budget below it."""
    require_floor(workload)
    events: list[Event] = []
    for i in range(len(workload.graph.ops)):
        reads, writes = workload.reads[i], workload.writes[i]
        for s in dict.fromkeys((*reads, *writes)):
            if workload.uses[s][0] < i or s in workload.host_resident - workload.fresh:
                events += [Event(Kind.RELOAD, s), Event(Kind.RELOADED, s)]
        events.append(Event(Kind.RUN, i))
        for s in dict.fromkeys((*writes, *reads)):
            wanted = workload.uses[s][-1] > i
            if s in writes and (wanted or s in workload.host_resident):
                events += [Event(Kind.OFFLOAD, s), Event(Kind.OFFLOADED, s)]
            elif wanted or s in workload.host_resident:
                events.append(Event(Kind.DROP, s))
    return tuple(events)
