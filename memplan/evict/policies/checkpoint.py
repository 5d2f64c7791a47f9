"""`checkpoint`: computes again in the backward what the user's activation checkpoints drop, as eager does.

The first op of the backward that reads a dropped result of a region makes eager run the region's forward again (Chen et
al., "Training Deep Nets with Sublinear Memory Cost", 2016, as `torch.utils.checkpoint` has it). The same is done here,
but for ops whose results the backward does not need, directly or through others. Of a region within another, the
results that only its own backward needs are made for that alone: when the outer region runs again, they are dropped
once more, and the inputs of the inner regions stay until these have run again, too.
"""

from __future__ import annotations

import re
from dataclasses import replace

from memplan.core.graph import Op, Phase
from memplan.evict.workload import Event, Events, Kind, Workload

_BLOCK = re.compile(r"(?:[^.]+\.)*?\d+(?=\.|$)")  # a module path up to its first number: "h.3" of "h.3.attn.c_proj"


def with_blocks(workload: Workload) -> Workload:
    """Return a workload with the model's checkpoints or, if it has none, with one around each of its repeated blocks.

    That is what one writes by hand to save memory: a block's input is kept, and the backward makes the rest again. A
    block that the forward enters again has another checkpoint there. Results that other blocks read are kept.
    """
    ops, first = workload.graph.ops, workload.graph.forward_ops
    if any(op.checkpoint for op in ops):
        return workload
    region: list[int] = []
    last, count = "", 0
    for op in ops[:first]:
        block = _BLOCK.match(op.origin.module)
        if block and block[0] != last:
            last, count = block[0], count + 1
        region.append(count if block else 0)
    left = {
        i
        for i in range(first)
        if any(region[j] != region[i] for s in workload.writes[i] for j in workload.uses[s] if j < first)
    }

    def marked(i: int, op: Op) -> Op:
        return replace(op, checkpoint=region[i]) if i < first and i not in left else op

    graph = replace(workload.graph, ops=tuple(marked(i, op) for i, op in enumerate(ops)))
    other = replace(workload, graph=graph)
    other.__dict__.update({**workload.__dict__, "graph": graph})  # nothing that is cached depends on checkpoints
    return other


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
        self.within = {op.checkpoint: op.within for op in ops if op.checkpoint}
        outermost = {region: (*around, region)[0] for region, around in self.within.items()}
        last: dict[int, int] = {}  # outermost region -> the last op that uses one of its results
        for s, region in found.items():
            last[outermost[region]] = max(last.get(outermost[region], -1), workload.uses[s][-1])
        self.dropped_by = {
            s: region for s, region in found.items() if last[outermost[region]] <= workload.redo_until[s]
        }
        self.regions: dict[int, list[int]] = {}  # region -> its ops, in order
        self.results: dict[int, list[int]] = {}  # region -> what it drops
        self.inputs_of: dict[int, set[int]] = {}  # what a region drops -> the regions within it that read it
        for i, op in enumerate(ops[: self.first]):
            self.regions.setdefault(op.checkpoint, []).append(i)
            for s in workload.reads[i]:
                if op.checkpoint and self.dropped_by.get(s) in op.within:
                    self.inputs_of.setdefault(s, set()).add(op.checkpoint)
        for s, region in self.dropped_by.items():
            self.results.setdefault(region, []).append(s)
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
                    if s in self.dropped_by and self.workload.uses[s][-1] == i and not self._is_needed(s, i + 1):
                        self._drop(s)
        return tuple(self.found)

    def _drop(self, storage: int) -> None:
        self.found.append(Event(Kind.DROP, storage))
        self.absent.add(storage)

    def _make_again(
        self,
        region: int,
        position: int,
        needed: frozenset[int] = frozenset(),
        *,
        held: frozenset[int] = frozenset(),
        alone: bool = False,
    ) -> None:
        """Run again the ops of a region that lead to `needed`, or to what ops at or after `position` read.

        `alone`: not to the latter, for which the region will run once more. What is `held` is not dropped.
        """
        w, ops, held = self.workload, self.regions[region], held | needed
        results = () if alone else (s for i in ops for s in w.writes[i])
        wanted = {s for s in results if s in self.absent and self._is_needed(s, position)} | needed
        again: list[int] = []
        for i in reversed(ops):
            if wanted.intersection(w.writes[i]):
                again.append(i)
                wanted |= self._absent_before(i, region)
        again.reverse()
        made = {s for i in again for s in w.writes[i]}
        lent = set[int]()  # what another region made for this one, and will make once more for itself
        last_touch = {s: i for i in again for s in (*w.writes[i], *w.reads[i])}
        for i in again:
            while absent := [s for s in w.reads[i] if s in self.absent]:
                other = self.dropped_by[absent[0]]
                theirs = frozenset(s for s in absent if self.dropped_by[s] == other)
                around = other in self.within[region]
                self._make_again(other, position, theirs, held=held.union(w.reads[i]), alone=not around)
                lent |= set() if around else theirs
            self.found.append(Event(Kind.RUN, i))
            self.absent -= wanted.intersection(w.writes[i])
            self.found += [Event(Kind.DROP, s) for s in sorted(self.absent.intersection(w.writes[i]))]
            for s in sorted({*w.writes[i], *w.reads[i]} - self.absent - held):
                if last_touch[s] != i or s not in self.dropped_by:
                    continue
                if (alone and s in made) or s in lent or not self._is_needed(s, position):
                    self._drop(s)
        for s in sorted({s for i in again for s in w.reads[i] if s in self.inputs_of} - self.absent - held):
            if not self._is_needed(s, position):
                self._drop(s)

    def _absent_before(self, op: int, region: int) -> set[int]:
        """Return what is absent of a region's own results that an op reads, or what it reads of regions within."""
        w, found, ops, seen = self.workload, set[int](), [op], set[int]()
        while ops:
            for s in w.reads[ops.pop()]:
                if s not in self.absent or s in seen:
                    continue
                seen.add(s)
                if self.dropped_by[s] == region:
                    found.add(s)
                elif region in self.within[self.dropped_by[s]]:
                    ops += w.writers[s]
        return found

    def _is_needed(self, storage: int, position: int) -> bool:
        """Return whether an op at or after `position` reads a storage, or a region that will have to run again."""
        if self.workload.uses[storage][-1] >= position:
            return True
        return any(
            s in self.absent and self._is_needed(s, position)
            for region in self.inputs_of.get(storage, ())
            for s in self.results.get(region, ())
        )
