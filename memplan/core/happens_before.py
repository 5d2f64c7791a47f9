"""Proves that copies and collectives of a plan cannot race with its ops: the happens-before order of uses of a byte.

Ops run on the compute lane of the device whose arena they use, copies on a lane for each direction and pair of
devices; a lane runs its work in order, and lanes run beside each other. A copy starts after all work that was launched
before it on the devices between which it copies, and what is launched on any device after its wait runs after the copy.
A collective that is started and waited for has a lane of its own: nothing is taken for granted of the order in which a
process group completes them.
An op of a lane on the host (`Op.on_host`) starts after all that was launched before it on every device, and the host
waits for that lane where it waits for copies.
Any other op that uses no arena is the host's: it runs between what was launched on compute lanes before it, and after.
A forward and a backward may each be called on another stream than what ran before: each has compute lanes of its own,
which begin after those before (the turn). Where copies go to and from tensors of the caller on the host, the host waits
for all copies at the end of a forward and of a backward (it settles): everything later is after them. The caller then
reads results, and may change or free all that is not the plan's, on its own lane: the host, or the compute lane.
Nothing else orders lanes. Two uses of a byte, at least one of which writes it, must
be ordered. Vector clocks (Mattern, 1989; as race detectors use them, FastTrack, 2009) tell whether they are.

The check shares no code with the policies that place copies, nor with the comparison of contents in
`evict/equivalent.py`, which follows storages in program order; this one follows bytes in the arena, where what
two storages share depends on their offsets.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from memplan.core.collectives import WAIT
from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph, Op, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.errors import InvalidPlan

_STARTS = (OFFLOAD, RELOAD, SEND)
_ARENA, _HOST, _BESIDE = "arena of ", "host", "beside on the host"
_OURS = (StorageKind.HOST, StorageKind.RNG_STATE)  # what only the plan touches, although it is not in an arena
CALLER = "the caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """Two uses of the same bytes that nothing orders.

    `first` and `second` are names of ops (or "the caller") in the order in which they are launched; `space` names the
    memory ("arena of cuda:0", "memory of host copies", or a storage outside both), the bytes are [start, end) in it.
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
    that are started before they are waited for.
    """

    races: tuple[Race, ...]
    copies: int


def has_copies(plan: Plan) -> bool:
    """Return whether anything in the plan runs beside its ops."""
    return any(op.target in TRANSFERS or op.starts for op in plan.graph.ops)


def follow(
    plan: Plan,
    *,
    without: Collection[int] = (),
    unordered: Collection[int] = (),
    unturned: Collection[int] = (),
    unsettled: Collection[int] = (),
) -> Ordering:
    """Return which uses of bytes in two consecutive steps of `plan` nothing orders.

    All but the plan is for tests, which leave something out.

    Args:
        plan: the plan.
        without: positions in the schedule of waits to leave out.
        unordered: positions in the schedule of starts that do not wait for what was launched before.
        unturned: phases that do not wait for the one before: 0 and 1 are the forward and the backward of the first
            step, 2 and 3 those of the second. A plan without a backward has phases 0 and 2.
        unsettled: phases at whose end the host does not wait for copies.

    Returns:
        The races, and the number of copies.

    Example:
        >>> follow(plan).races
        ()
    """
    lanes = _Lanes(plan)
    order = [lanes.graph.ops[index] for index in plan.schedule.order]
    split = sum(op.phase is Phase.FORWARD for op in order)
    for phase in range(4):  # the next step uses the same bytes, and lanes that do not settle go on
        backward = bool(phase % 2)
        if backward and split == len(order):
            continue
        lanes.turn(phase, ordered=phase not in unturned)
        for position in range(split, len(order)) if backward else range(split):
            op = order[position]
            if op.on_host:
                lanes.begin(op, ordered=position not in unordered)
            elif _starts(op):
                lanes.start(op, ordered=position not in unordered)
            elif op.target in TRANSFERS:
                if position not in without:
                    lanes.wait(op)
            else:
                lanes.run(op)
        if phase not in unsettled:
            lanes.settle()
        lanes.give(backward=backward, ends=backward or split == len(order))
    copies = sum(map(_starts, lanes.graph.ops))
    return Ordering(races=tuple(lanes.races), copies=copies)


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
    """The lanes of a plan as they run: what each knows to be complete, and what each has used.

    `compute` are the compute lanes of the present phase, by device; `callers` the storages that are not the plan's.
    """

    def __init__(self, plan: Plan) -> None:
        self.graph: Graph = plan.placed
        placed = plan.solution.offsets
        self.devices = tuple(dict.fromkeys(s.device for s in plan.graph.storages if s.name in placed))
        self.bytes = _bytes_of(plan, self.devices)
        self.compute: dict[str, str] = {}
        kept = enumerate(self.graph.storages)
        self.callers = {i: s for i, s in kept if not s.planned and s.kind not in _OURS}
        copied = {s for op in self.graph.ops if op.target in _STARTS for s in self.graph.touched(op)}
        self.settles = any(s in self.callers and not self.bytes[s].device for s in copied)
        self.settled: _Clock = {}  # what the host has waited for, or done: everything else is launched after it
        self.clocks: defaultdict[str, _Clock] = defaultdict(lambda: dict(self.settled))
        self.uses: defaultdict[str, defaultdict[str, list[_Use]]] = defaultdict(lambda: defaultdict(list))
        self.ended: dict[tuple[int, int], _Clock] = {}  # (source, destination) -> the clock of its lane
        self.copies: set[str] = set()  # the lanes that copy, and that of the host's ops
        self.races: list[Race] = []

    def run(self, op: Op) -> None:
        """Run an op on the compute lane of the device whose arena it uses, or on the host.

        What such a lane's op reads on the host is read when it is launched, and what it writes there (`y.cpu()`) is
        complete when it returns.
        """
        touched = sorted(self.graph.touched(op), key=lambda s: not self.bytes[s].space.startswith(_ARENA))
        device = next((self.bytes[s].device for s in touched if self.bytes[s].device), "")
        lane = self.compute[device] if device else _HOST
        if not device:
            self._wait_on_host(*self.compute.values())  # its operands arrived by copies that the host waited for
        self._use(lane, op, host=_HOST)
        if any(not self.bytes[s].device for s in self.graph.written(op)):
            self._wait_on_host(lane)
        if any(not self.bytes[s].device for s in touched):
            self._wait_on_host(_HOST)

    def turn(self, phase: int, *, ordered: bool) -> None:
        """Compute on other streams from now on, which wait for those before."""
        for device in self.devices:
            lane, before = f"{device} in phase {phase}", self.compute.get(device)
            if before is not None and ordered:
                _join(self.clocks[lane], self.clocks[before])
            self.compute[device] = lane

    def settle(self) -> None:
        """Let the host wait for all copies, if any of them is to or from the caller's memory on the host."""
        if self.settles:
            self._wait_on_host(*self.copies)

    def give(self, *, backward: bool, ends: bool) -> None:
        """Let the caller read the results of a phase, and, where the step `ends`, write all that is the caller's.

        After a forward whose backward follows, the caller writes the gradients of its results (the tangents).
        """
        results = self.graph.gradients if backward else self.graph.outputs
        read = dict.fromkeys(self.graph.values[v].storage for v in results)
        written = [i for i, s in self.callers.items() if ends or s.kind is StorageKind.TANGENT]
        for lane in (_HOST, *self.compute.values()):
            self._tick(lane)
        for storage, writes in (*((s, False) for s in read), *((s, True) for s in written)):
            device = self.bytes[storage].device
            self._touch(self.compute[device] if device else _HOST, storage, writes=writes, by=CALLER)
        self._wait_on_host(_HOST)

    def start(self, op: Op, *, ordered: bool) -> None:
        """Start a copy on the lane of its direction and devices, or a collective on a lane of its own."""
        pair = self._pair(op, op.reads[:1], op.writes[:1])
        lane = " ".join((op.target, *(self.bytes[s].device for s in pair), *([op.name] if op.starts else ())))
        if ordered:
            for device in sorted({self.bytes[s].device for s in pair} - {""}):
                _join(self.clocks[lane], self.clocks[self.compute[device]])
        if op.target in _STARTS:
            self.copies.add(lane)
        self._use(lane, op, host=lane)
        self.ended[pair] = dict(self.clocks[lane])

    def begin(self, op: Op, *, ordered: bool) -> None:
        """Run an op on the lane of the host's ops, which is waited for as copies are."""
        for lane in self.compute.values() if ordered else ():
            _join(self.clocks[_BESIDE], self.clocks[lane])
        self.copies.add(_BESIDE)
        self._use(_BESIDE, op, host=_BESIDE)

    def wait(self, op: Op) -> None:
        """Order what is launched from now on after a copy."""
        pair = self._pair(op, op.reads[:1], op.reads[1:2])
        if pair not in self.ended:
            what = "collective" if op.target == WAIT else "copy"
            raise InvalidPlan(f"waits for a {what} that was not started", where=f"op {op.name}")
        ended = self.ended.pop(pair)
        for lane in self.compute.values():
            _join(self.clocks[lane], ended)

    def _use(self, lane: str, op: Op, *, host: str) -> None:
        """Note what an op uses, on its lane, and what of it is on the host, on the lane `host`."""
        for one in {lane, host}:
            self._tick(one)
        for values, writes in ((op.reads, False), (op.writes, True)):
            for value in values:
                storage = self.graph.values[value].storage
                self._touch(lane if self.bytes[storage].device else host, storage, writes=writes, by=op.name)

    def _tick(self, lane: str) -> None:
        self.clocks[lane][lane] = self.clocks[lane].get(lane, 0) + 1

    def _touch(self, lane: str, storage: int, *, writes: bool, by: str) -> None:
        """Note a use at the present time of a lane."""
        place = self.bytes[storage]
        if place.start < place.end:
            use = _Use(bytes=place, writes=writes, by=by, time=self.clocks[lane][lane])
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

    def _wait_on_host(self, *lanes: str) -> None:
        """Launch everything from now on after what lanes have done so far."""
        for lane in lanes:
            _join(self.settled, self.clocks[lane])
        for clock in self.clocks.values():
            _join(clock, self.settled)


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
