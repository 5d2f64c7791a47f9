"""What was measured of a compiled step while it trained: what each op, access and copy took (Capuchin's term)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from memplan.core.evictions import TRANSFERS
from memplan.core.plan import Plan
from memplan.errors import UnknownName
from memplan.evict.costs import CostModel
from memplan.runtime.copies.copies import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """An op touches a storage at `step` of the plan, `seconds` after the step began."""

    op: str
    step: int
    seconds: float
    writes: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Accesses:
    """All accesses of one storage (all its lives), the op that first made it and the storages which that read."""

    storage: str
    nbytes: int
    producer: str
    inputs: tuple[str, ...]
    accesses: tuple[Access, ...]

    @property
    def count(self) -> int:
        """How many ops of a step touch it, recomputes and copies counted."""
        return len(self.accesses)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTime:
    """A copy of `storage` (index; `nth` in its direction): started and waited for at these steps of the plan.

    `seconds` is how long it took, `stall` how long its wait was.
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
    """What `samples` steps of `plan` took: medians of seconds.

    `op_seconds[k]` is the time of the op at step k, waits included; `begun[k]` when it began, after the step did.
    `costs` are the costs that follow: what the next plan is made from.
    """

    plan: Plan
    samples: int
    begun: tuple[float, ...]
    op_seconds: tuple[float, ...]
    copies: tuple[CopyTime, ...]
    costs: CostModel

    @property
    def seconds(self) -> float:
        """Of one step: all ops and waits, without what the user does between forward and backward."""
        return sum(self.op_seconds)

    @property
    def stall(self) -> float:
        """Of these, the seconds spent waiting for copies."""
        return sum(copy.stall for copy in self.copies)

    @property
    def late(self) -> tuple[CopyTime, ...]:
        """The reloads that were waited for."""
        return tuple(c for c in self.copies if c.direction is Direction.TO_DEVICE and c.stall > 0)

    def accesses(self, name: str) -> Accesses:
        """All accesses of the storage of that name (without a budget). Raises `UnknownName`."""
        graph, base = self.plan.graph, bases(self.plan)
        found: list[Access] = []
        made = None
        for step, index in enumerate(self.plan.schedule.order):
            op = graph.ops[index]
            if name not in {graph.storages[base(s)].name for s in graph.touched(op)}:
                continue
            writes = name in {graph.storages[base(s)].name for s in graph.written(op)}
            if writes and made is None and op.target not in TRANSFERS:
                made = op
            found.append(Access(op=op.name, step=step, seconds=self.begun[step], writes=writes))
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
    """Of a storage, the storage of the traced graph that it is a life of."""
    base: Mapping[int, int] = {life: of for of, life in plan.eviction.instances} if plan.eviction else {}
    return lambda storage: base.get(storage, storage)
