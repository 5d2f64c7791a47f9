"""Builds the offset-assignment problem of a scheduled graph: each planned storage becomes a buffer."""

from __future__ import annotations

from collections.abc import Callable

from memplan.core.graph import Graph, Storage, StorageKind
from memplan.core.problem import Buffer, Problem
from memplan.core.schedule import Schedule, storage_intervals


def problem(graph: Graph, schedule: Schedule, *, alignment: int, redzone: int = 0) -> Problem:
    """Return the offset-assignment problem of `graph` under `schedule`.

    Sizes are rounded up to a multiple of `alignment` bytes, so that every buffer also ends aligned. `redzone` bytes (a
    multiple of `alignment`) are added on each side of every buffer. Buffers are in the order of their first use.
    """
    return _problem(graph, schedule, lambda storage: storage.planned, alignment, redzone)


def device_problem(problem: Problem, graph: Graph, device: str) -> Problem:
    """Return the part of `problem` whose buffers are on `device`, one of several."""
    there = {s.name for s in graph.storages if s.device == device}
    return Problem(buffers=tuple(b for b in problem.buffers if b.id in there))


def host_problem(graph: Graph, schedule: Schedule, *, alignment: int) -> Problem:
    """Return the offset-assignment problem of the copies on the host, which are in an arena of their own."""
    return _problem(graph, schedule, lambda storage: storage.kind is StorageKind.HOST, alignment, 0)


def _problem(
    graph: Graph, schedule: Schedule, chosen: Callable[[Storage], bool], alignment: int, redzone: int
) -> Problem:
    buffers = []
    for index, live in storage_intervals(graph, schedule.order).items():
        storage = graph.storages[index]
        if chosen(storage) and storage.nbytes:
            buffers.append(
                Buffer(
                    id=storage.name,
                    size=-(-storage.nbytes // alignment) * alignment + 2 * redzone,
                    live=live,
                    alignment=alignment,
                    kind=storage.kind.value,
                    origin=storage.origin.module or storage.origin.op,
                )
            )
    return Problem(buffers=tuple(buffers))
