"""Predicts the seconds of a step on several devices: ops run one after another, copies in a lane per direction."""

from __future__ import annotations

from collections.abc import Callable

from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph
from memplan.evict.costs import CostModel


def simulate(graph: Graph, costs: CostModel) -> tuple[float, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and those of them spent waiting for
    copies.
    """
    seconds: dict[str, Callable[[int], float]] = {
        OFFLOAD: costs.to_host.seconds,
        RELOAD: costs.to_device.seconds,
        SEND: costs.to_device.seconds,
    }
    clock, stall = 0.0, 0.0
    free = dict.fromkeys(seconds, 0.0)
    ends: dict[tuple[int, int], float] = {}
    for op in graph.ops:
        if op.target not in TRANSFERS:
            clock += costs.op_seconds(graph, op)
            continue
        pair = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
        if op.target in seconds:
            free[op.target] = max(clock, free[op.target]) + seconds[op.target](graph.storages[pair[0]].nbytes)
            ends[pair] = free[op.target]
        else:
            end = ends.pop(pair)
            stall += max(0.0, end - clock)
            clock = max(clock, end)
    return clock, stall
