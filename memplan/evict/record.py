"""What a plan says of its evictions: which storage, how, and at which steps."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from memplan.graph import Graph

OFFLOAD, OFFLOAD_WAIT = "memplan.offload", "memplan.offload_wait"
RELOAD, RELOAD_WAIT = "memplan.reload", "memplan.reload_wait"
TRANSFERS = (OFFLOAD, OFFLOAD_WAIT, RELOAD, RELOAD_WAIT)


class Action(enum.Enum):
    """How a storage's bytes are given up and had again; the value is the word for people."""

    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """One absence of a storage from the device (Capuchin's terms; steps of the plan's schedule).

    `evicted_access` is the last use before, `back_access` the next after it; at `in_trigger` the reload (or the
    op that makes it again) starts. `instance` is the storage that holds it from then on.
    """

    storage: str
    instance: str
    action: Action
    nbytes: int
    evicted_access: int
    in_trigger: int
    back_access: int


def evictions_of(graph: Graph, instances: Sequence[tuple[int, int]]) -> tuple[Eviction, ...]:
    """Every absence that ends in a use; `instances`: (storage, further life of it) in the order of their births."""
    touches: dict[int, list[int]] = {}
    for step, op in enumerate(graph.ops):
        for s in graph.touched(op):
            touches.setdefault(s, []).append(step)
    found = []
    previous: dict[int, int] = {}
    for base, instance in instances:
        steps = touches[instance]
        using = [s for s in steps if instance not in graph.written(graph.ops[s])]
        if not using:
            continue  # thrown away, or waiting for the end
        before = [s for s in touches.get(previous.get(base, base), ()) if s < steps[0]]
        accesses = [s for s in before if graph.ops[s].target not in TRANSFERS]
        found.append(
            Eviction(
                storage=graph.storages[base].name,
                instance=graph.storages[instance].name,
                action=Action.OFFLOAD if graph.ops[steps[0]].target == RELOAD else Action.RECOMPUTE,
                nbytes=graph.storages[base].nbytes,
                evicted_access=accesses[-1] if accesses else 0,
                in_trigger=steps[0],
                back_access=using[0],
            )
        )
        previous[base] = instance
    return tuple(found)
