"""Lower bounds of max live over every legal order of a graph's ops."""

from __future__ import annotations

from memplan.graph import Graph


def working_set_bound(graph: Graph) -> int:
    """Bytes of the largest working set: whatever the order, all that one op touches is alive while it runs."""
    return max(
        (sum(graph.storages[s].nbytes for s in graph.touched(op) if graph.storages[s].planned) for op in graph.ops),
        default=0,
    )
