"""Proves that copies and collectives of a plan cannot race with its ops: the happens-before order of uses of a byte.

Ops run on the compute lane of the device whose arena they use, copies on a lane for each direction and pair of
devices; a lane runs its work in order, and lanes run beside each other. A copy starts after all work that was launched
before it on the devices between which it copies, and what is launched on any device after its wait runs after the copy.
A collective that is started and waited for has a lane of its own: nothing is taken for granted of the order in which a
process group completes them.
An op that uses no arena is the host's: it runs between what was launched on compute lanes before it, and after it.
Nothing else orders lanes. Two uses of a byte, at least one of which writes it, must
be ordered. Vector clocks (Mattern, 1989; as race detectors use them, FastTrack, 2009) tell whether they are.

The check shares no code with the policies that place copies, nor with the comparison of contents in
`evict/graph/equivalent.py`, which follows storages in program order; this one follows bytes in the arena, where what
two storages share depends on their offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memplan.core.collectives import WAIT
from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph, Op, StorageKind
from memplan.core.plan import Plan
from memplan.errors import InvalidPlan

_STARTS = (OFFLOAD, RELOAD, SEND)
_ARENA, _HOST = "arena of ", "host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two uses of the same bytes that nothing orders.

    `first` and `second` are names of ops in the order in which they are launched; `space` names the memory ("arena of
    cuda:0", "memory of host copies", or a storage outside both), and the bytes are [start, end) in it.
    """

    first: str
    second: str
    space: str
    start: int
    end: int

    @property
    def text(self) -> str:
        """The race in one line."""
        return f"{self.first} and {self.second} use bytes [{self.start}, {self.end}) of the {self.space} in any order"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """The result of following a plan's lanes.

    `races` are the pairs of uses that nothing orders. `copies` is the number of copies in a step, and of collectives
    that are started before they are waited for, `idle_waits` the
    positions in the schedule of waits without which the same would be ordered, because an earlier wait for a later copy
    of the same lane orders it too. They are run all the same: the error of a copy is raised at its wait.
    """

    races: tuple[Race, ...]
    copies: int
    idle_waits: tuple[int, ...]


def has_copies(plan: Plan) -> bool:
    """Return whether anything in the plan runs beside its ops."""
    return any(op.target in TRANSFERS or op.starts for op in plan.graph.ops)


def follow(plan: Plan, *, without: Collection[int] = (), unordered: Collection[int] = ()) -> Ordering:
    """Return which uses of bytes in two consecutive steps of `plan` nothing orders.

    Args:
        plan: the plan.
        without: positions in the schedule of waits to leave out; for tests.
        unordered: positions in the schedule of starts that do not wait for what was launched before; for tests.

    Returns:
        The races, and the waits that order nothing.

    Example:
        >>> follow(plan).races
        ()
    """
    lanes = _Lanes(plan)
    idle: list[int] = []
    for step in range(2):  # the next step uses the same bytes, and no lane waits at the end of a step
        for position, index in enumerate(plan.schedule.order):
            op = lanes.graph.ops[index]
            if _starts(op):
                lanes.start(op, ordered=position not in unordered)
            elif op.target in TRANSFERS:
                if position not in without and lanes.wait(op) and step:
                    idle.append(position)
            else:
                lanes.run(op)
    copies = sum(map(_starts, lanes.graph.ops))
    return Ordering(races=tuple(lanes.races), copies=copies, idle_waits=tuple(idle))


def require_no_races(plan: Plan) -> None:
    """Raise `InvalidPlan` naming the first two uses of the same bytes that nothing orders."""
    if not has_copies(plan):
        return
    races = follow(plan).races
    if races:
        raise InvalidPlan(f"{races[0].text}; {len(races)} such pairs in two steps", where="schedule")


def _starts(op: Op) -> bool:
    """Return whether an op returns before what it does is complete: the start of a copy, or of a collective."""
    return op.target in _STARTS or op.starts


_Clock = dict[str, int]  # lane -> how many of its uses of memory are known to be complete


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """The bytes [start, end) of a memory, and the device whose compute lane uses them ("" for memory of the host)."""

    space: str
    start: int
    end: int
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """One use of bytes, by the op of that name, at `time` of its lane's clock."""

    bytes: _Bytes
    writes: bool
    by: str
    time: int


class _Lanes:
    """The lanes of a plan as they run: what each knows to be complete, and what each has used."""

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.placed
        placed = plan.solution.offsets
        self.devices = tuple(dict.fromkeys(s.device for s in plan.graph.storages if s.name in placed))
        self.bytes = _bytes_of(plan, self.devices)
        self.clocks: defaultdict[str, _Clock] = defaultdict(dict)
        self.uses: defaultdict[str, defaultdict[str, list[_Use]]] = defaultdict(lambda: defaultdict(list))
        self.ended: dict[tuple[int, int], tuple[str, _Clock]] = {}  # (source, destination) -> its lane and clock
        self.races: list[Race] = []

    def run(self, op: Op) -> None:
        """Run an op on the compute lane of the device whose arena it uses, or on the host."""
        touched = sorted(self.graph.touched(op), key=lambda s: not self.bytes[s].space.startswith(_ARENA))
        device = next((self.bytes[s].device for s in touched if self.bytes[s].device), "")
        if not device:  # its operands arrived by copies that the host waited for
            for other in self.devices:
                _join(self.clocks[_HOST], self.clocks[other])
        self._use(device or _HOST, op)
        if not device:
            for other in self.devices:
                _join(self.clocks[other], self.clocks[_HOST])

    def start(self, op: Op, *, ordered: bool) -> None:
        """Start a copy on the lane of its direction and devices, or a collective on a lane of its own."""
        pair = self._pair(op, op.reads[:1], op.writes[:1])
        lane = " ".join((op.target, *(self.bytes[s].device for s in pair), *([op.name] if op.starts else ())))
        if ordered:
            for compute in self._compute(pair):
                _join(self.clocks[lane], self.clocks[compute])
        self._use(lane, op)
        self.ended[pair] = lane, dict(self.clocks[lane])

    def wait(self, op: Op) -> bool:
        """Order what is launched from now on after a copy; return whether it was before."""
        pair = self._pair(op, op.reads[:1], op.reads[1:2])
        if pair not in self.ended:
            what = "collective" if op.target == WAIT else "copy"
            raise InvalidPlan(f"waits for a {what} that was not started", where=f"op {op.name}")
        lane, ended = self.ended.pop(pair)
        known = all(self.clocks[compute].get(lane, 0) >= ended[lane] for compute in self.devices)
        for compute in self.devices:
            _join(self.clocks[compute], ended)
        return known

    def _use(self, lane: str, op: Op) -> None:
        clock = self.clocks[lane]
        clock[lane] = clock.get(lane, 0) + 1
        for values, writes in ((op.reads, False), (op.writes, True)):
            for value in values:
                place = self.bytes[self.graph.values[value].storage]
                use = _Use(bytes=place, writes=writes, by=op.name, time=clock[lane])
                if place.start < place.end:
                    self._compare(use, lane)
                    self.uses[place.space][lane].append(use)

    def _compare(self, use: _Use, lane: str) -> None:
        """Note the uses of other lanes that are not known to be complete, and touch the same bytes."""
        for other, uses in self.uses[use.bytes.space].items():
            if other == lane:
                continue
            known = bisect_right(uses, self.clocks[lane].get(other, 0), key=lambda u: u.time)
            for before in uses[known:]:
                start = max(before.bytes.start, use.bytes.start)
                end = min(before.bytes.end, use.bytes.end)
                if start < end and (before.writes or use.writes):
                    space = use.bytes.space
                    self.races.append(Race(first=before.by, second=use.by, space=space, start=start, end=end))

    def _pair(self, op: Op, sources: Sequence[int], destinations: Sequence[int]) -> tuple[int, int]:
        """Return the storages between which an op copies."""
        if not sources or not destinations or not op.writes:
            raise InvalidPlan("is not a copy from one storage to another", where=f"op {op.name}")
        return self.graph.values[sources[0]].storage, self.graph.values[destinations[0]].storage

    def _compute(self, storages: tuple[int, int]) -> list[str]:
        """Return the compute lanes of the devices whose arenas hold these storages."""
        return sorted({self.bytes[s].device for s in storages} - {""})


def _join(clock: _Clock, other: _Clock) -> None:
    for lane, time in other.items():
        clock[lane] = max(clock.get(lane, 0), time)


def _bytes_of(plan: Plan, devices: Collection[str]) -> list[_Bytes]:
    """Return the bytes of every storage: in the arena of one of `devices`, among the host copies, or of its own."""
    sizes = {b.id: b.size for b in plan.problem.buffers}
    host = plan.eviction.host.offsets if plan.eviction else {}
    found = []
    for storage in plan.graph.storages:
        space, start, size = f"storage {storage.name}", 0, storage.nbytes
        device = storage.device if storage.device in devices else ""
        if storage.kind is StorageKind.HOST:
            device = ""
            if storage.name in host:
                space, start = "memory of host copies", host[storage.name]
        elif storage.name in sizes:
            space, start, size = f"{_ARENA}{device}", plan.solution.offsets[storage.name], sizes[storage.name]
        found.append(_Bytes(space=space, start=start, end=start + size, device=device))
    return found
