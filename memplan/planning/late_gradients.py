"""Chooses gradients to leave outside the arena, where the peak beside the arena comes before the arena's own."""

from __future__ import annotations

from memplan.core.plan import Plan
from memplan.core.schedule import storage_intervals


def late_gradients(plan: Plan) -> frozenset[int]:
    """Return the planned gradients (storages, by index) that make the total smallest if the caller's memory holds them.

    The arena takes its bytes for the whole step. A gradient outside takes its bytes from when it is made: behind the
    peak of what is outside, it costs nothing there. Gradients leave the arena in the order of their birth, last first.
    """
    graph, order = plan.graph, plan.schedule.order
    born = {s: live.start for s, live in storage_intervals(graph, order).items()}
    candidates = sorted(graph.gradients_in_arena & born.keys(), key=lambda s: (-born[s], s))
    sizes = {buffer.id: buffer.size for buffer in plan.problem.buffers}
    inside, outside = [0] * len(order), list(plan.outside_profile)
    for buffer in plan.problem.buffers:
        for step in range(buffer.live.start, buffer.live.end):
            inside[step] += buffer.size
    best, count = max(inside, default=0) + max(outside, default=0), 0
    for k, s in enumerate(candidates):
        storage = graph.storages[s]
        for step in range(born[s], len(order)):
            inside[step] -= sizes.get(storage.name, 0)
            outside[step] += storage.nbytes
        total = max(inside) + max(outside)
        if total < best:
            best, count = total, k + 1
    return frozenset(candidates[:count])
