"""Measured execution: an `OpTimer` times each op of a program.

It counts whole steps only: a step that ends early, or whose backward is never called, is not counted.
A `Measurement` has the medians.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from operator import sub
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch import nn

from memplan.core.arguments import arguments_of
from memplan.core.evictions import OFFLOAD, RELOAD, SEND, TRANSFERS
from memplan.core.graph import Graph
from memplan.core.plan import Plan
from memplan.devices.host_memory import unlock_unused
from memplan.devices.kinds import forked, is_accelerator, name_of
from memplan.devices.streams import hold, new_event, record
from memplan.errors import InvalidCosts, UnknownName
from memplan.evict.costs import DEVICES, CostModel, signature_of
from memplan.evict.feedback import link_of
from memplan.planning.options import PlanOptions
from memplan.runtime.copies import Copy, Direction
from memplan.runtime.debug.sanitizers import Sanitizers
from memplan.runtime.execute.program import Program
from memplan.runtime.execute.runner import Runner
from memplan.runtime.execute.trial import Trial, without_autocast
from memplan.runtime.guards.input_guards import require_real
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.kernels import CallForm
from memplan.runtime.memory.arena import Arena, Memory, arena_for
from memplan.trace import device_costs, plan_traced, trace
from memplan.trace.capture.refusals import module_of
from memplan.trace.traced import Source


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
    nbytes: int = 0
    seconds: float = 0.0
    stall: float = 0.0


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


PROBES = (1 << 12, 1 << 26)  # bytes of the copies that are timed if a step has too few, at most the size of the arena
_ROUNDS = 3  # copies of each size


class OpTimer:
    """Times the whole steps of a program. Its runner calls `sanitizers` around each op (`Runner.time`)."""

    def __init__(self, program: Program) -> None:
        self.plan = program.plan
        self._device = program.traced.device
        self._copies = tuple(_copies(program))
        steps = len(self.plan.schedule.order)
        self._in_stream = is_accelerator(self._device)  # there the stream waits for copies, not the host
        self._marks = Marks(2 * steps, self._device)
        self._stalled = [0.0] * len(self._copies)
        # when each op of a whole step began and ended, and the seconds and the stall of each copy
        self._samples: list[tuple[list[float], list[float], list[tuple[float, float]]]] = []
        befores: list[tuple[Callable[[], None], ...]] = [(self._marks.mark(2 * step),) for step in range(steps)]
        afters: list[tuple[Callable[[], None], ...]] = [(self._marks.mark(2 * step + 1),) for step in range(steps)]
        if steps:
            befores[0] = (self._begin, *befores[0])
            afters[-1] = (*afters[-1], self._finish)
        self.sanitizers = Sanitizers(tuple(befores), tuple(afters))

    @property
    def samples(self) -> int:
        """The number of whole steps that were timed."""
        return len(self._samples)

    def measurement(self, base: CostModel, arena: Arena, *, skip: int = 0) -> Measurement:
        """Return the medians of all steps after the first `skip`; other costs are those of `base`.

        The arena must be free: if the steps had no copies of two sizes in a direction, copies are timed in it.
        """
        samples = self._samples[skip:]
        assert samples
        begun, ended = ([list(of) for of in zip(*(s[k] for s in samples), strict=True)] for k in (0, 1))
        seconds = [median(map(sub, to, since)) for since, to in zip(begun, ended, strict=True)]
        copies = tuple(
            replace(
                planned,
                nbytes=copy.nbytes,
                seconds=median(s[2][k][0] for s in samples),
                stall=median(s[2][k][1] for s in samples),
            )
            for k, (planned, copy) in enumerate(self._copies)
        )
        ops = zip(self.plan.schedule.order, seconds, strict=True)
        return Measurement(
            plan=self.plan,
            samples=len(samples),
            begun=tuple(map(median, begun)),
            op_seconds=tuple(seconds),
            copies=copies,
            costs=_with_measured(
                base, self.plan.graph, ops, copies, arena, name=f"measured in training on {self._device.type}"
            ),
        )

    def _begin(self) -> None:
        self._stalled = [copy.stalled for _, copy in self._copies]

    def _finish(self) -> None:
        at = self._marks.seconds()
        begun, ended, copies = at[::2], at[1::2], []
        for (planned, copy), before in zip(self._copies, self._stalled, strict=True):
            waited = ended[planned.waited] - begun[planned.waited]
            copies.append((copy.seconds, waited if self._in_stream else copy.stalled - before))
        self._samples.append((begun, ended, copies))


def probe(arena: Arena, direction: Direction) -> list[tuple[int, float]]:
    """Return (bytes, seconds) of copies between the arena, which must be free, and the host."""
    found = []
    arena.copies.timed = True
    for nbytes in sorted({min(n, arena.nbytes) for n in PROBES}):
        found += [(nbytes, seconds) for seconds in _seconds_of_copies(arena, direction, nbytes)]
    unlock_unused(arena.device)
    return found


def _seconds_of_copies(arena: Arena, direction: Direction, nbytes: int) -> list[float]:
    """Return the seconds of some copies of so many bytes. The memory on the host is free when it returns."""
    host = Memory(nbytes, torch.device("cpu"), beside=arena.device)
    copy = arena.copies.copy(direction, host.memory)
    here = arena.memory[:nbytes]
    pair = (host.memory, here) if direction is Direction.TO_HOST else (here, host.memory)
    found = []
    for _ in range(_ROUNDS):
        copy.start(*pair)
        copy.wait()
        found.append(copy.seconds)
    arena.copies.drain()
    arena.copies.forget(host.memory)
    return found


class Marks:
    """Points in time: by the clock of the host, or by events of the compute stream of an accelerator."""

    def __init__(self, count: int, device: torch.device) -> None:
        self._at, self._device = [0.0] * count, device
        self._events = [new_event(device, timed=True) for _ in range(count)] if is_accelerator(device) else []

    def mark(self, index: int) -> Callable[[], None]:
        """Return a function that records point `index` when it is called."""
        if self._events:
            return partial(record, self._events[index], self._device)

        def note() -> None:
            self._at[index] = perf_counter()

        return note

    def seconds(self) -> list[float]:
        """Return the seconds of each point after the first one, after waiting for the end of the step."""
        if self._events:
            self._events[-1].synchronize()
            return [self._events[0].elapsed_time(event) / 1e3 for event in self._events]
        return [at - self._at[0] for at in self._at]


def _copies(program: Program) -> Iterator[tuple[CopyTime, Copy]]:
    """Yield the planned copies, not timed yet, in the order of their starts, which is that of `program.copies`."""
    graph, order = program.plan.graph, program.plan.schedule.order
    base = bases(program.plan)
    waits: dict[tuple[int, int], list[int]] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        if op.target in TRANSFERS and op.target not in (OFFLOAD, RELOAD, SEND):
            waits.setdefault((op.reads[0], op.reads[1]), []).append(step)
    copies = iter(program.copies)
    count: dict[tuple[int, str], int] = {}
    for step, index in enumerate(order):
        op = graph.ops[index]
        if op.target == SEND:
            next(copies)
        if op.target not in (OFFLOAD, RELOAD):
            continue
        out = op.target == OFFLOAD
        storage = base(graph.values[(op.reads if out else op.writes)[0]].storage)
        nth = count[storage, op.target] = count.get((storage, op.target), -1) + 1
        planned = CopyTime(
            storage=storage,
            name=graph.storages[storage].name,
            nth=nth,
            direction=Direction.TO_HOST if out else Direction.TO_DEVICE,
            started=step,
            waited=next((w for w in waits.get((op.reads[0], op.writes[0]), ()) if w > step), len(order) - 1),
        )
        yield planned, next(copies)


def profile(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    rounds: int = 5,
) -> CostModel:
    """Measure the ops of a step of `model`, and copies to the host and back, on this machine.

    The result also applies to ops of other models that are called with the same shapes; ops that were not measured get
    the estimate for this kind of device.

    Args:
        model: The module to measure. It is not changed.
        example_inputs: A tuple of positional arguments, a dict of keywords (without `example_kwargs`), or the only
            argument: real tensors.
        example_kwargs: The keyword arguments.
        train: Whether to measure forward and backward, or the forward alone. None follows `model.training`.
        rounds: How often each op is measured, after one run to warm up. The call takes about `rounds` steps.

    Returns:
        The measured costs, in seconds and bytes per second, for `costs=` of `memplan.plan` and `memplan.compile`. They
        can be saved (`costs.save(path)`) and loaded (`memplan.load_costs(path)`).

    Raises:
        InvalidCosts: `rounds` is not an int of at least 1.
        UnsupportedGraph: The model cannot be traced as one graph.
        InputMismatch: A parameter, buffer or input is a fake or meta tensor.

    Example:
        ```python
        costs = memplan.profile(model, inputs)
        plan = memplan.plan(model, inputs, budget="50%", costs=costs)
        ```
    """
    if not isinstance(rounds, int) or rounds < 1:
        raise InvalidCosts(f"is {rounds}", where="rounds", hint="measure at least one round")
    model, (args, kwargs) = module_of(model), arguments_of(example_inputs, example_kwargs)
    require_real(model, args, kwargs)
    traced = trace(model, args, kwargs, train=train)
    plan = plan_traced(traced, PlanOptions(schedule="traced"))
    runner = Runner(ModuleGuards(model), traced, plan, arena_for(plan, traced.device), sanitize=None)
    return measured_costs(runner, rounds)


def measured_costs(made: Runner, rounds: int = 1) -> CostModel:
    """Return the costs that a program is measured to have, before any step runs: of each op, and of copies.

    It keeps its example, and runs on one device. The ops run once to warm up, and `rounds` times; copies are timed
    apart from the arena, which is not used.
    Measured execution is Capuchin's (Peng et al., ASPLOS 2020), which measures the first training steps.
    """
    device = made.traced.device
    found = _op_seconds(made.program, rounds).items()
    base, name = DEVICES[device_costs(device)], name_of(device) or f"{device.type}, torch {torch.__version__}"
    return _with_measured(base, made.plan.graph, found, (), Arena(PROBES[-1], device), name=f"measured on {name}")


def _with_measured(
    base: CostModel,
    graph: Graph,
    ops: Iterable[tuple[int, float]],
    copies: Sequence[CopyTime],
    arena: Arena,
    *,
    name: str,
) -> CostModel:
    """Return costs with the measured ones of ops (index, seconds), and of copies.

    Where `copies` have fewer than two sizes in a direction, some are timed in the arena, which must be free.
    """
    times = defaultdict[str, list[float]](list)
    for index, taken in ops:
        if graph.ops[index].target not in TRANSFERS:
            times[signature_of(graph, graph.ops[index])].append(taken)
    links = {}
    for direction, old in ((Direction.TO_HOST, base.to_host), (Direction.TO_DEVICE, base.to_device)):
        known = [(c.nbytes, c.seconds) for c in copies if c.direction is direction]
        if len({nbytes for nbytes, _ in known if nbytes}) < 2:
            known += probe(arena, direction)
        links[direction] = link_of(known) or old
    return replace(
        base,
        name=name,
        measured={**base.measured, **{signature: max(median(taken), 0.0) for signature, taken in times.items()}},
        to_host=links[Direction.TO_HOST],
        to_device=links[Direction.TO_DEVICE],
    )


def _op_seconds(program: Program, rounds: int) -> dict[int, float]:
    """Return the median seconds by op index, for all ops that change no tensor of the user.

    On an accelerator, the results of ops live as long as the step needs them, and ops are queued behind a wait, so that
    what the host takes to launch them is not counted. On the host, all results have memory from the start: an op would
    be the first to touch its pages otherwise.
    """
    traced, names, device = program.traced, program.namespace.names, program.traced.device
    inputs = [(i, b) for i, b in enumerate(traced.bindings) if b.source is Source.INPUT]
    tensors = {i: traced.example_inputs[b.index].detach() for i, b in inputs}
    static = {index: names[f"v{index}"] for index in program.layout.static if f"v{index}" in names}
    trial = Trial(traced, program.plan, program.layout, static, tensors)
    in_stream = is_accelerator(device)
    if not in_stream:
        for index in trial.order:
            trial.memory.before(index)
    found: dict[int, list[float]] = {i: [] for i in trial.order if i in trial.tried}
    marks = Marks(2 * len(found), device)
    around = {index: (marks.mark(2 * k), marks.mark(2 * k + 1)) for k, index in enumerate(found)}
    starts = [k for k, index in enumerate(trial.order) if program.bound[index].form is CallForm.START]
    waits = {k: until - k for k, until in pairwise((0, *starts, len(trial.order)))}  # the host waits for each copy here
    with torch.no_grad(), forked(device), without_autocast(device):
        for _ in range(rounds + 1):
            for k, index in enumerate(trial.order):
                bound = program.bound[index]
                if k in waits:
                    hold(device, waits[k])
                if in_stream:
                    trial.memory.before(index, bound)
                if index in found:
                    begin, end = around[index]
                    begin()
                    trial.run(index, bound)
                    end()
                if in_stream:
                    trial.memory.after(index)
            if in_stream:
                trial.memory.clear()
            at = marks.seconds() if found else []
            for times, begun, ended in zip(found.values(), at[::2], at[1::2], strict=True):
                times.append(ended - begun)
    return {index: median(times[1:]) for index, times in found.items()}
