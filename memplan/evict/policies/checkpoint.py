"""`checkpoint`: computes again in the backward what the user's activation checkpoints drop, as eager does.

The first op of the backward that reads a dropped result of a region makes eager run the region's forward again (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016, as `torch.utils.checkpoint` has it). The same is done here,
but for ops whose results the backward does not need, directly or through others.
"""

from __future__ import annotations

from memplan.core.graph import Phase
from memplan.evict.events import Event, Events, Kind
from memplan.evict.workload import Workload


def checkpoint(workload: Workload) -> Events:
    """Return the events of the step with its checkpoints followed; the budget is not looked at.

    Results that cannot be computed again bit by bit are kept: random ones without a saved state of the generator, and
    those of inputs that are overwritten before the region runs again.
    """
    return workload.around(_Follower(workload).events())


class _Follower:
    """Goes through the ops in order and inserts what is dropped and made again."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        ops, self.first = workload.graph.ops, workload.graph.forward_ops
        found = {
            s: ops[writers[0]].checkpoint
            for s, writers in enumerate(workload.writers)
            if writers
            and workload.recomputable[s]
            and all(ops[i].checkpoint and ops[i].phase is Phase.FORWARD for i in writers)
        }
        last: dict[int, int] = {}  # region -> the last op that uses one of its results
        for s, region in found.items():
            last[region] = max(last.get(region, -1), workload.uses[s][-1])
        self.dropped_by = {s: region for s, region in found.items() if last[region] <= workload.redo_until[s]}
        self.regions: dict[int, list[int]] = {}  # region -> its ops, in order
        for i, op in enumerate(ops[: self.first]):
            self.regions.setdefault(op.checkpoint, []).append(i)
        self.absent: set[int] = set()
        self.found: list[Event] = []

    def events(self) -> Events:
        """Return the events of the whole step."""
        last = {s: max((i for i in self.workload.uses[s] if i < self.first), default=-1) for s in self.dropped_by}
        due: dict[int, list[int]] = {}
        for s, i in last.items():
            due.setdefault(i, []).append(s)
        for i in range(len(self.workload.graph.ops)):
            for s in self.workload.reads[i]:
                if s in self.absent:
                    self._make_again(self.dropped_by[s], i)
            self.found.append(Event(Kind.RUN, i))
            for s in due.get(i, ()):
                self._drop(s)
            if i >= self.first:
                for s in self.workload.reads[i]:
                    if s in self.dropped_by and self.workload.uses[s][-1] == i:
                        self._drop(s)
        return tuple(self.found)

    def _drop(self, storage: int) -> None:
        self.found.append(Event(Kind.DROP, storage))
        self.absent.add(storage)

    def _make_again(self, region: int, position: int, needed: frozenset[int] = frozenset()) -> None:
        """Run again the ops of a region that lead to `needed`, or to what ops at or after `position` read."""
        w, ops = self.workload, self.regions[region]
        wanted = {s for i in ops for s in w.writes[i] if s in self.absent and self._is_used(s, position)} | needed
        again: list[int] = []
        for i in reversed(ops):
            if wanted.intersection(w.writes[i]):
                again.append(i)
                wanted |= {s for s in w.reads[i] if s in self.absent and self.dropped_by[s] == region}
        again.reverse()
        last_touch = {s: i for i in again for s in (*w.writes[i], *w.reads[i])}
        for i in again:
            for s in w.reads[i]:
                if s in self.absent:
                    self._make_again(self.dropped_by[s], position, frozenset({s}))
            self.found.append(Event(Kind.RUN, i))
            self.absent -= wanted.intersection(w.writes[i])
            for s in sorted({*w.writes[i], *w.reads[i]} - self.absent - needed):
                if last_touch[s] == i and s in self.dropped_by and not self._is_used(s, position):
                    self._drop(s)

    def _is_used(self, storage: int, position: int) -> bool:
        return self.workload.uses[storage][-1] >= position
