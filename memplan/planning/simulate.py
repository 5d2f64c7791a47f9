"""Predicts the seconds of a step: ops run one after another, copies in a lane per direction, collectives over one link.

What starts a copy or a collective returns at once; what waits for it waits until it is complete. Collectives of a rank
share its link, and run in the order in which they start, whatever their groups are.
"""

from __future__ import annotations

from collections.abc import Callable

from memplan.core.collectives import is_collective
from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph, Op
from memplan.evict.costs import CostModel

_LINK = "link between ranks"


class Clock:
    """The predicted time of a step while its ops run, in seconds from its start.

    `now` is the time at which the next op can run, `stall` the part of it that was spent waiting. `ends`: when each
    copy and collective that is under way is complete, by the storages that it reads and writes.
    """

    def __init__(self, graph: Graph, costs: CostModel) -> None:
        self._graph, self._costs = graph, costs
        self._copies: dict[str, Callable[[int], float]] = {
            OFFLOAD: costs.to_host.seconds,
            RELOAD: costs.to_device.seconds,
            SEND: costs.to_device.seconds,
        }
        self._free = dict.fromkeys((*self._copies, _LINK), 0.0)
        self.now = self.stall = 0.0
        self.ends: dict[tuple[int, int], float] = {}

    def run(self, op: Op) -> None:
        """Run the next op.

        A collective that is not started before it is waited for counts as an op, and waiting for the link before it as
        waiting.
        """
        graph, costs, free = self._graph, self._costs, self._free
        pair = (-1, -1)
        if op.target in TRANSFERS or op.starts:
            pair = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
        if op.starts:
            self.now += costs.launch
            free[_LINK] = max(self.now, free[_LINK]) + costs.op_seconds(graph, op) - costs.launch
            self.ends[pair] = free[_LINK]
        elif is_collective(op.target):
            self._wait(free[_LINK])
            self.now = free[_LINK] = self.now + costs.op_seconds(graph, op)
        elif op.target in self._copies:
            took = self._copies[op.target](graph.storages[pair[0]].nbytes)
            self.ends[pair] = free[op.target] = max(self.now, free[op.target]) + took
        elif op.target in TRANSFERS:
            self._wait(self.ends.pop(pair))
        else:
            self.now += costs.op_seconds(graph, op)

    def _wait(self, end: float) -> None:
        self.stall += max(0.0, end - self.now)
        self.now = max(self.now, end)


def simulate(graph: Graph, costs: CostModel) -> tuple[float, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and those of them spent waiting."""
    clock = Clock(graph, costs)
    for op in graph.ops:
        clock.run(op)
    return clock.now, clock.stall
