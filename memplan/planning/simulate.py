"""Predicts the seconds of a step: ops run one after another, copies in a lane per direction, collectives over one link.

What starts a copy or a collective returns at once; what waits for it waits until it is complete. Collectives of a rank
share its link, and run in the order in which they start, whatever their groups are.
"""

from __future__ import annotations

from collections import defaultdict
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

    `one_link`: all process groups of a rank share its link; otherwise each has one that is as fast, which is the most
    that groups could bring.
    """

    def __init__(self, graph: Graph, costs: CostModel, *, one_link: bool = True) -> None:
        self._graph, self._costs, self._one_link = graph, costs, one_link
        self._copies: dict[str, Callable[[int], float]] = {
            OFFLOAD: costs.to_host.seconds,
            RELOAD: costs.to_device.seconds,
            SEND: costs.to_device.seconds,
        }
        self._free = defaultdict[str, float](float)  # when each lane has done what is queued
        self.now = self.stall = 0.0
        self.ends: dict[tuple[int, int], float] = {}

    def run(self, op: Op) -> None:
        """Run the next op.

        A collective that is not started before it is waited for counts as an op, and waiting for the link before it as
        waiting.
        """
        graph, costs, free = self._graph, self._costs, self._free
        pair, link = (-1, -1), _LINK if self._one_link else f"{_LINK}, {op.group}"
        if op.target in TRANSFERS or op.starts:
            pair = graph.values[op.reads[0]].storage, graph.values[op.writes[0]].storage
        if op.starts:
            self.now += costs.launch
            free[link] = max(self.now, free[link]) + costs.op_seconds(graph, op) - costs.launch
            self.ends[pair] = free[link]
        elif is_collective(op.target):
            self._wait(free[link])
            self.now = free[link] = self.now + costs.op_seconds(graph, op)
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


def simulate(graph: Graph, costs: CostModel, *, one_link: bool = True) -> tuple[float, float]:
    """Return the predicted seconds of a step whose ops are in schedule order, and those of them spent waiting.

    `one_link`: as in `Clock`.
    """
    clock = Clock(graph, costs, one_link=one_link)
    for op in graph.ops:
        clock.run(op)
    return clock.now, clock.stall
