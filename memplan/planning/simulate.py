"""Predicts the seconds of a step: ops run one after another, copies in a lane per direction, collectives over one link.

What starts a copy or a collective returns at once; what waits for it waits until it is complete. Collectives of a rank
share its link, and run in the order in which they start, whatever their groups are.
"""

from __future__ import annotations

from collections.abc import Callable

from memplan.core.collectives import is_collective
from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph
from memplan.evict.costs import CostModel

_LINK = "link between ranks"


def simulate(graph: Graph, costs: CostModel) -> tuple[float, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and those of them spent waiting.

    A collective that is not started before it is waited for counts as an op, and waiting for the link before it as
    waiting.
    """
    seconds: dict[str, Callable[[int], float]] = {
        OFFLOAD: costs.to_host.seconds,
        RELOAD: costs.to_device.seconds,
        SEND: costs.to_device.seconds,
    }
    clock, stall = 0.0, 0.0
    free = dict.fromkeys((*seconds, _LINK), 0.0)
    ends: dict[tuple[int, int], float] = {}
    for op in graph.ops:
        pair = (-1, -1)
        if op.target in TRANSFERS or op.starts:
            pair = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
        if op.starts:
            clock += costs.launch
            ends[pair] = free[_LINK] = max(clock, free[_LINK]) + costs.op_seconds(graph, op) - costs.launch
        elif is_collective(op.target):
            stall += max(0.0, free[_LINK] - clock)
            clock = free[_LINK] = max(clock, free[_LINK]) + costs.op_seconds(graph, op)
        elif op.target in seconds:
            free[op.target] = max(clock, free[op.target]) + seconds[op.target](graph.storages[pair[0]].nbytes)
            ends[pair] = free[op.target]
        elif op.target in TRANSFERS:
            end = ends.pop(pair)
            stall += max(0.0, end - clock)
            clock = max(clock, end)
        else:
            clock += costs.op_seconds(graph, op)
    return clock, stall
