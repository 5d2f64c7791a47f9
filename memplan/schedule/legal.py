"""Which orders compute the same: what must run before what, and whether an order keeps to it."""

from __future__ import annotations

from memplan.errors import InvalidPlan
from memplan.graph import Graph, Phase


def predecessors(graph: Graph) -> tuple[frozenset[int], ...]:
    """For each op (by index) the ops that must run before it, directly.

    Ops that touch one storage keep their traced order when one of them writes it; random ops keep theirs
    among each other, so that a seed gives the same numbers.
    """
    writer: dict[int, int] = {}
    readers: dict[int, list[int]] = {}
    last_random: int | None = None
    found: list[frozenset[int]] = []
    for index, op in enumerate(graph.ops):
        before: set[int] = set()
        written = set(graph.written(op))
        for storage in graph.touched(op):
            if storage in writer:
                before.add(writer[storage])
            if storage in written:
                before.update(readers.get(storage, ()))
                writer[storage], readers[storage] = index, []
            else:
                readers.setdefault(storage, []).append(index)
        if op.random:
            if last_random is not None:
                before.add(last_random)
            last_random = index
        found.append(frozenset(before))
    return tuple(found)


def require_legal(graph: Graph, order: tuple[int, ...]) -> None:
    """Raise `InvalidPlan` naming the first fault unless `order` runs every op once, after what it needs.

    Forward ops come before backward ops: the caller's loss is computed in between.
    """
    if sorted(order) != list(range(len(graph.ops))):
        raise InvalidPlan("is not an order of the graph's ops", where="schedule.order")
    before = predecessors(graph)
    done: set[int] = set()
    backward = False
    for step, index in enumerate(order):
        op = graph.ops[index]
        missing = before[index] - done
        if missing:
            first = graph.ops[min(missing)].name
            raise InvalidPlan(f"runs {op.name!r} before {first!r}, which it needs", where=f"schedule.order[{step}]")
        if backward and op.phase is Phase.FORWARD:
            raise InvalidPlan(f"runs {op.name!r} of the forward in the backward", where=f"schedule.order[{step}]")
        backward = backward or op.phase is Phase.BACKWARD
        done.add(index)
