"""`Measurement`: the measured seconds of the ops, accesses and copies of a compiled step while it trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memplan.core.evictions import TRANSFERS
from memplan.core.plan import Plan
from memplan.errors import UnknownName
from memplan.evict.costs import CostModel
from memplan.runtime.copies.copies import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageAccess:
    """One access of an op to a storage, at `step` of the schedule, `seconds` after the training step began."""

    op: str
    step: int
    seconds: float
    writes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """All accesses of one storage, with the op that produced it first and the storages that this op read.

    Recomputed and reloaded instances of the storage count too. `nbytes` is its size.
    """

    storage: str
    nbytes: int
    producer: str
    inputs: tuple[str, ...]
    accesses: tuple[StorageAccess, ...]

    @property
    def count(self) -> int:
        """The number of ops of a step that access the storage, recomputes and copies included."""
        return len(self.accesses)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """A copy of `storage` (an index), the `nth` of that storage in its direction.

    `started` and `waited` are steps of the schedule, `seconds` is the time of the copy, and `stall` that of its wait.
    """

    storage: int
    name: str
    nth: int
    direction: Direction
    started: int
    waited: int
    nbytes: int
    seconds: float
    stall: float


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """The measured seconds of a plan, as medians over training steps.

    Attributes:
        plan: The plan that was measured.
        samples: The number of measured training steps.
        begun: For each step of the schedule, when its op began, in seconds after the training step began.
        op_seconds: For each step of the schedule, the seconds of its op, waits included.
        copies: The times of the copies.
        costs: The measured costs, from which the next plan is made.
    """

    plan: Plan
    samples: int
    begun: tuple[float, ...]
    op_seconds: tuple[float, ...]
    copies: tuple[CopyTime, ...]
    costs: CostModel

    @property
    def seconds(self) -> float:
        """The seconds of one training step: all ops and waits, without the time between forward and backward."""
        return sum(self.op_seconds)

    @property
    def stall(self) -> float:
        """The part of `seconds` that is spent waiting for copies."""
        return sum(copy.stall for copy in self.copies)

    @property
    def late(self) -> tuple[CopyTime, ...]:
        """The reloads that ops had to wait for."""
        return tuple(c for c in self.copies if c.direction is Direction.TO_DEVICE and c.stall > 0)

    def accesses(self, name: str) -> Accesses:
        """Return all accesses of a storage, by its name in the plan without a budget.

        Raises `UnknownName` if there is no such storage.
        """
        graph, base = self.plan.graph, bases(self.plan)
        found: list[StorageAccess] = []
        made = None
        for step, index in enumerate(self.plan.schedule.order):
            op = graph.ops[index]
            if name not in {graph.storages[base(s)].name for s in graph.touched(op)}:
                continue
            writes = name in {graph.storages[base(s)].name for s in graph.written(op)}
            if writes and made is None and op.target not in TRANSFERS:
                made = op
            found.append(StorageAccess(op=op.name, step=step, seconds=self.begun[step], writes=writes))
        storage = next((s for s in graph.storages if s.name == name), None)
        if storage is None:
            raise UnknownName(f"no storage is called {name!r}", where="accesses", hint="see plan.graph.storages")
        read = () if made is None else dict.fromkeys(base(graph.values[v].storage) for v in made.reads)
        return Accesses(
            storage=name,
            nbytes=storage.nbytes,
            producer="" if made is None else made.name,
            inputs=tuple(graph.storages[s].name for s in read if graph.storages[s].name != name),
            accesses=tuple(found),
        )


def bases(plan: Plan) -> Callable[[int], int]:
    """Return a function from a storage to the storage of the traced graph that it is an instance of."""
    base: Mapping[int, int] = {instance: of for of, instance in plan.eviction.instances} if plan.eviction else {}
    return lambda storage: base.get(storage, storage)
