"""Says how busy kernels and copies are over the predicted time of a step."""

from __future__ import annotations

from dataclasses import dataclass
from math import isclose

from memplan.core.evictions import OFFLOAD, RELOAD, TRANSFERS
from memplan.core.plan import Plan

PARTS = 48  # of a step, as wide as a picture in a terminal
_COPIES = {RELOAD: "copies to the device", OFFLOAD: "copies to the host"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """A lane of a step: kernels, the copies of a direction, or updates on the host. It runs beside the other lanes.

    It is `busy` for so many seconds of a step; `shares` are those of each of `PARTS` equal parts of the step's time.
    """

    name: str
    busy: float
    shares: tuple[float, ...]


def lanes_of(plan: Plan) -> tuple[Lane, ...]:
    """Return the lanes of a step of one device with copies, as its costs predict them; () where these have no name.

    What the compute lane waits for, and the collectives of several ranks, are in no lane.
    """
    if plan.eviction is None or plan.devices or not any(op.target in _COPIES for op in plan.graph.ops):
        return ()
    from memplan.evict.costs import DEVICES, ON_HOST, Clock, simulate  # few plans need it

    costs = DEVICES.get(plan.eviction.costs)
    if costs is None or not isclose(simulate(plan.graph, costs)[0], plan.eviction.seconds):  # others than the plan's
        return ()
    clock, busy = Clock(plan.graph, costs), dict[str, list[tuple[float, float]]]()
    for op in (plan.graph.ops[i] for i in plan.schedule.order):
        before = clock.now
        clock.run(op)
        if op.target in _COPIES:
            source, copy = (plan.graph.values[v].storage for v in (op.reads[0], op.writes[0]))
            link = costs.to_host if op.target == OFFLOAD else costs.to_device
            end, took = clock.ends[source, copy], link.seconds(plan.graph.storages[source].nbytes)
            busy.setdefault(_COPIES[op.target], []).append((end - took, end))
        elif op.on_host:
            took = costs.seconds_on_host(plan.graph, op)
            busy.setdefault(ON_HOST, []).append((clock.host_end - took, clock.host_end))
        elif op.target not in TRANSFERS:
            busy.setdefault("kernels", []).append((before, clock.now))
    clock.finish()
    return tuple(
        Lane(name=name, busy=sum(end - start for start, end in busy[name]), shares=_shares(busy[name], clock.now))
        for name in ("kernels", *_COPIES.values(), ON_HOST)
        if name in busy
    )


def _shares(spans: list[tuple[float, float]], whole: float) -> tuple[float, ...]:
    """Return the shares of equal parts of [0, whole) that are in spans which do not overlap."""
    found = [0.0] * PARTS
    for start, end in spans:
        low, high = (min(at / whole * PARTS, PARTS) for at in (start, end))
        for part in range(int(low), min(int(high) + 1, PARTS)):
            found[part] += max(min(high, part + 1) - max(low, part), 0.0)
    return tuple(min(share, 1.0) for share in found)
