"""The figures of a plan: every format of the report is rendered from a `Report`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from memplan.analysis.buffers import Holder, OpAt, alive_at, largest, op_at
from memplan.analysis.explain import Lever, levers
from memplan.analysis.lanes import Lane, lanes_of
from memplan.analysis.needs import OPTIMIZER, Needed, needed, set_aside
from memplan.core.division import Division
from memplan.core.evictions import SEND, Action, DeviceArena
from memplan.core.jsonio import to_json
from memplan.core.later import later
from memplan.core.plan import GraphSection, Plan
from memplan.core.problem import Status
from memplan.core.schedule import Evidence, live_bytes
from memplan.core.units import format_bytes

LARGEST = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """Bytes outside the arena, by kind; a kind that is None has not been measured.

    `outputs` and `gradients` belong to the caller, and are written directly by the last kernel. `intermediate` are
    results that need less here than in the arena, `fallbacks` results of ops without an `out=` kernel, `temporaries`
    what kernels allocate internally (if that was not `measured`, what is known of attention's): each the most at any
    one step. `during` is the most that these five hold together at one step, which is less than their sum if their
    peaks are at different steps. `inputs`, `parameters` and `constants` exist before the step; `reserve` is what the
    user reserved. `workspaces` are what libraries of the device keep: set aside for a target, None (not known) on one
    that is here, 0 on the CPU.
    """

    outputs: int
    gradients: int
    intermediate: int
    fallbacks: int
    temporaries: int | None
    measured: bool
    during: int
    inputs: int
    tangents: int
    optimizer_state: int
    parameters: int
    constants: int
    reserve: int
    workspaces: int | None

    @property
    def total(self) -> int:
        """The most bytes outside the arena: what `Plan.total` adds to the arena."""
        model = self.parameters + self.optimizer_state + self.constants
        return self.during + self.inputs + self.tangents + model + self.reserve + (self.workspaces or 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak(OpAt):
    """The first step at which max live bytes are alive, how many buffers are, and the largest of them."""

    alive: int
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Functional:
    """The ops of one target that return new tensors, whose results are copied into the arena.

    `bytes` is the sum over all `calls`, `most` that of the largest call: the bytes outside the arena at one time.
    """

    target: str
    calls: int
    bytes: int
    most: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """The evictions that keep a budget, and their cost; `budget` limits the total, `arena_budget` the arena.

    `recomputed` and `offloaded` are the bytes that are recomputed, and copied to the host and back, in a step (counted
    each time), `host_size` the bytes of the arena on the host, `pinned` the most of the host's memory that is locked.
    `updated` are the bytes of parameters and state that updates on the host change. `seconds`, `base_seconds` (without
    a budget) and `stall` are predicted by the costs of `costs`. `device` is where the step runs if the model and the
    caller are on the host, "" if all are on the same device. `sections` are the arenas of several devices, `sent` the
    bytes that are copied between them in a step.
    """

    budget: int | None
    arena_budget: int
    policy: str
    costs: str
    recomputes: int
    recomputed: int
    offloads: int
    offloaded: int
    host_size: int
    pinned: int
    on_host: int
    updated: int
    seconds: float
    base_seconds: float
    stall: float
    overhead: float
    device: str
    sections: tuple[DeviceArena, ...]
    sent: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """The collectives of a step of one rank, each counted as often as it runs.

    `gathers` are those of parameters, `again` the gathers that repeat an earlier one, `others` all other collectives,
    and `sent` the bytes that go over the link of this rank, each way. At step `gathered_step` it holds the most bytes
    of gathered parameters, `gathered`; `Plan.gathered` has those of each step.
    """

    gathers: int
    again: int
    others: int
    sent: int
    gathered: int
    gathered_step: int


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The figures of a plan. Sizes are bytes, steps are positions in the schedule.

    `gradients` are bytes of the arena that hold gradients after the step, until the next one.

    `status` is the quality of the layout (see `problem.Status`), `bound` the lower bound of any arena in this order. It
    is proven unless `layout_claimed`: then it is read from a plan file and was not proven when that was loaded, and
    `status` is "claimed" instead of "optimal".

    `order_max_live` is what this order needs, `order_traced` what the traced order needs, and `order_bound` the least
    that any order needs, all without alignment. `order_evidence` proves the bound (at the op `order_proof`, unless that
    is empty). `order_certified`: this order needs no more than the bound.

    `graphs` are those of a joint plan (empty: there is one graph).

    `kept` is how a budget is kept (None: there is none), whose recomputes and copies the order's figures include.
    `exchanged` are the collectives (None: there are no other ranks). `division` is how ops were divided by rows (None:
    they were not), `kernels` which kernels were chosen and why ("": there was no choice). `peak` is None when nothing
    is planned.
    `advice` are ways to save memory, each with the most that it saves. `needed` is the total with an optimizer. `lanes`
    are how busy kernels and copies are over the predicted time of a step; () without copies, or with other costs.
    """

    model: str
    fingerprint: str
    graphs: tuple[GraphSection, ...]
    backward: bool
    steps: int
    buffers: int
    arena_size: int
    gradients: int
    max_live: int
    fragmentation: float
    padding: int
    status: str
    bound: int
    layout_claimed: bool
    solver: str
    policy: str
    order_certified: bool
    order_max_live: int
    order_traced: int
    order_bound: int
    order_gap: float
    order_evidence: Evidence
    order_proof: str
    kept: Kept | None
    lanes: tuple[Lane, ...]
    exchanged: Exchanged | None
    division: Division | None
    kernels: str
    outside: Outside
    outside_total: int
    total: int
    needed: Needed
    peak: Peak | None
    largest: tuple[Holder, ...]
    functional: tuple[Functional, ...]
    advice: tuple[Lever, ...]
    versions: tuple[tuple[str, str], ...]

    def __repr__(self) -> str:
        sizes = f"arena {format_bytes(self.arena_size)}, total {format_bytes(self.total)}"
        return f"<Report of {self.model or 'a model'}: {self.steps} steps, {self.buffers} buffers, {sizes}>"

    def __str__(self) -> str:
        """Return the report as plain text."""
        text: str = later("report_text")(self)
        return text

    def _repr_html_(self) -> str:
        """Return what notebooks show."""
        fragment: str = later("report_fragment")(self)
        return fragment


_OF_PLAN = ("model", "fingerprint", "arena_size", "max_live", "fragmentation", "padding", "total", "division")
_OF_ORDER = ("certified", "max_live", "bound", "gap", "evidence", "proof")
_OF_EVICTION = ("budget", "arena_budget", "policy", "costs", "seconds", "base_seconds", "stall", "overhead", "device")


def make_report(plan: Plan, optimizer: str = OPTIMIZER) -> Report:
    """Return the report of `plan`, with what an optimizer keeps of a training step that has no update of its own.

    It takes milliseconds on thousands of ops.
    """
    graph, solution, outside = plan.graph, plan.solution, _outside(plan)
    claimed = solution.claimed and solution.status is Status.OPTIMAL
    return Report(
        **_copied(plan, _OF_PLAN),
        **{f"order_{name}": value for name, value in _copied(plan.schedule, _OF_ORDER).items()},
        graphs=plan.sections,
        backward=graph.forward_ops < len(graph.ops),
        steps=len(plan.schedule.order),
        buffers=len(plan.problem.buffers),
        gradients=sum(graph.storages[s].nbytes for s in graph.gradients_in_arena),
        status="claimed" if claimed else solution.status.name.lower(),
        bound=solution.bound,
        layout_claimed=solution.claimed,
        solver=solution.solver,
        policy=plan.schedule.policy,
        order_traced=max(live_bytes(graph, tuple(range(len(graph.ops)))), default=0),
        kept=_kept(plan),
        lanes=lanes_of(plan),
        exchanged=_exchanged(plan),
        kernels=plan.kernels,
        outside=outside,
        outside_total=outside.total,
        needed=needed(plan, optimizer),
        peak=_peak(plan),
        largest=largest(plan, LARGEST),
        functional=_functional(plan),
        advice=levers(plan),
        versions=tuple(sorted(plan.versions.items())),
    )


def _copied(source: object, names: Iterable[str]) -> dict[str, Any]:
    return {name: getattr(source, name) for name in names}


def _kept(plan: Plan) -> Kept | None:
    if plan.eviction is None:
        return None
    recomputed = [e.nbytes for e in plan.evictions if e.action is Action.RECOMPUTE]
    offloaded = [e.nbytes for e in plan.evictions if e.action is Action.OFFLOAD]
    return Kept(
        **_copied(plan.eviction, _OF_EVICTION),
        recomputes=len(recomputed),
        recomputed=sum(recomputed),
        offloads=len(offloaded),
        offloaded=sum(offloaded),
        host_size=plan.host_size,
        pinned=plan.pinned,
        on_host=plan.on_host,
        updated=plan.graph.updated_on_host,
        sections=plan.devices,
        sent=sum(plan.graph.values[op.reads[0]].shape[0] for op in plan.graph.ops if op.target == SEND),
    )


def _exchanged(plan: Plan) -> Exchanged | None:
    if not plan.collectives:
        return None
    gathers, most = [c for c in plan.collectives if c.gathers], max(plan.gathered)
    return Exchanged(
        gathers=len(gathers),
        again=sum(c.again for c in gathers),
        others=len(plan.collectives) - len(gathers),
        sent=sum(c.sent for c in plan.collectives),
        gathered=most,
        gathered_step=plan.gathered.index(most),
    )


def _outside(plan: Plan) -> Outside:
    aside = set_aside(plan)
    made: dict[str, Any] = {name.replace(" ", "_"): size for name, size in plan.outside.items()}
    made["temporaries"] = made["temporaries"] or (None if plan.temporaries is None else 0)
    return Outside(
        **{"intermediate": 0, **made, "reserve": aside},
        measured=plan.temporaries is not None,
        during=max(plan.outside_profile, default=0),
        workspaces=plan.reserve - aside or (None if plan.on_accelerator else 0),
    )


def _peak(plan: Plan) -> Peak | None:
    if not plan.problem.buffers:
        return None
    at, alive = op_at(plan, plan.problem.peak_step), plan.problem.alive_at(plan.problem.peak_step)
    return Peak(**to_json(at), alive=len(alive), holders=alive_at(plan, at.step, LARGEST))


def _functional(plan: Plan) -> tuple[Functional, ...]:
    """Return the ops that run functionally by target, most bytes first; results that the caller keeps do not count."""
    calls: dict[str, list[int]] = {}
    for op in plan.graph.ops:
        if size := plan.graph.functional_bytes(op):
            calls.setdefault(op.target, []).append(size)
    rows = (Functional(target=t, calls=len(c), bytes=sum(c), most=max(c)) for t, c in calls.items())
    return tuple(sorted(rows, key=lambda row: (-row.bytes, row.target)))


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as plain JSON types: every figure exact, in bytes, under the names of `Report`.

    `format` names and numbers its layout.
    """
    return {"format": "memplan-report-1", **to_json(report), "versions": dict(report.versions)}
