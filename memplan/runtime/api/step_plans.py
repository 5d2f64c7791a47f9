"""The programs of a compiled step: for each kind of call one `StepPlan`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from memplan.runtime.execute.runner import Runner
from memplan.trace.optimizer.updates import COUNTERS
from memplan.trace.traced import Source, TracedGraph


@dataclass(slots=True)
class Assembled:
    """A program with the trace that it was assembled from, so that it can be assembled again in a larger arena.

    `counted`: the parameters whose step counters it has in one tensor.
    """

    traced: TracedGraph
    runner: Runner
    counted: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.counted = next((b.names for b in self.traced.bound(Source.STATE) if b.key == COUNTERS), ())


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The programs for calls of one kind: batches of one layout, in one state of the model.

    `modes` and `update_key`: the training flags of all submodules, and what `StepGuards.update_key` was. `adding`: the
    program of calls that only add to the sums of gradients, if there are any. `updating`: that of the others.
    `forgotten`: its programs could not be assembled again, because the model has changed.
    """

    modes: list[bool]
    update_key: Any
    adding: Assembled | None
    updating: Assembled
    forgotten: bool = False

    @property
    def programs(self) -> list[Assembled]:
        """Its programs."""
        return [self.updating] if self.adding is None else [self.adding, self.updating]
