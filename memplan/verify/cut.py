"""Lower bounds over all orders of a graph, by networkx; shares no code with the prover in `memplan.schedule`.

While an op runs, some ops have run and the others have not. The set of those that have run is closed: with each op, it
contains all that must run before it. A storage is alive if the op touches it, or if an op that has run touched it and
one that has not run will. The least sum of live bytes over all closed sets is a minimum cut between a source (has run)
and a sink (has not).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.core.graph import Graph, Phase
from memplan.core.legal_orders import predecessors, to_networkx

_SOURCE, _SINK = "has run", "has not run"


def least_at(graph: Graph, op: int) -> int:
    """Return the fewest bytes of planned storages that can be alive while `op` (an index) runs, over all legal orders.

    A result of `op` may take the bytes of an input that has no later use: each such in-place candidate is one cut.
    """
    node = _sides(graph, op)
    users = _users(graph)
    own = {storage for storage in graph.touched(graph.ops[op]) if storage in users}
    fixed = sum(graph.storages[storage].nbytes for storage in own)
    least = fixed + _cut(graph, node, users, own)
    for result, read in graph.ops[op].inplace_candidates:
        host = graph.values[read].storage
        others = [node[user] for user in users.get(host, ()) if user != op]
        if host in own and _SINK not in others:
            saved = graph.storages[graph.values[result].storage].nbytes
            least = min(least, fixed - saved + _cut(graph, node, users, own, (others, saved)))
    return least


def between_phases(graph: Graph) -> int:
    """Return the bytes of planned storages alive between forward and backward, which are the same in every order."""
    kept = _kept(graph)
    total = 0
    for storage, ops in _users(graph).items():
        phases = {graph.ops[op].phase for op in ops}
        if Phase.FORWARD in phases and (Phase.BACKWARD in phases or storage in kept):
            total += graph.storages[storage].nbytes
    return total


def _kept(graph: Graph) -> set[int]:
    """Return the storages that the caller keeps, which are alive to the end."""
    return {graph.values[value].storage for value in (*graph.outputs, *graph.gradients)}


def _users(graph: Graph) -> dict[int, list[int]]:
    """Return for each planned storage the ops that touch it."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for storage in graph.touched(op):
            if graph.storages[storage].planned:
                users.setdefault(storage, []).append(index)
    return users


def _sides(graph: Graph, op: int) -> list[Any]:
    """Return the node of each op: the source if it must run before `op`, the sink if it cannot, else its own."""
    import networkx

    orders = to_networkx(graph)
    earlier, later = networkx.ancestors(orders, op), {op, *networkx.descendants(orders, op)}
    for i, other in enumerate(graph.ops):
        if other.phase is not graph.ops[op].phase:
            beyond = earlier if other.phase is Phase.FORWARD else later
            beyond.add(i)
    return [_SOURCE if i in earlier else _SINK if i in later else ("op", i) for i in range(len(graph.ops))]


def _cut(
    graph: Graph,
    node: Sequence[Any],
    users: Mapping[int, Sequence[int]],
    own: set[int],
    in_place: tuple[Sequence[Any], int] | None = None,
) -> int:
    """Return the least live bytes of storages that are not in `own`.

    `in_place`: (nodes, bytes) of an in-place candidate, whose bytes are added unless all of the nodes have run.
    """
    import networkx

    network = networkx.DiGraph()  # an arc without a capacity can never be cut: if its tail has run, so has its head
    network.add_nodes_from((_SOURCE, _SINK))
    for index, needed in enumerate(predecessors(graph)):
        if node[index] not in (_SOURCE, _SINK):
            network.add_edges_from((node[index], node[other]) for other in needed)
    kept = _kept(graph)
    for storage, ops in users.items():
        if storage not in own:
            born, dead = ("born", storage), ("dead", storage)
            network.add_edges_from((node[op], born) for op in ops)
            network.add_edges_from((dead, node[op]) for op in ops)
            network.add_edge(born, dead, capacity=graph.storages[storage].nbytes)
            if storage in kept:
                network.add_edge(dead, _SINK)
    if in_place is not None:
        nodes, saved = in_place
        network.add_edges_from(("last", n) for n in nodes)
        network.add_edge(_SOURCE, "last", capacity=saved)
    least, _ = networkx.minimum_cut(network, _SOURCE, _SINK)
    return int(least)
