"""Minimum cuts by networkx: what every order needs at one point. Shares no code with the prover in `memplan.schedule`.

While an op runs, some ops have run and the others have not. Those that have are closed: with each op, all that must
run before it. A storage is alive if the op touches it, or if one that has run touched it and one that has not will.
The least sum of live bytes over all closed sets is a minimum cut between a source (has run) and a sink (has not).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from memplan.graph import Graph, Phase
from memplan.schedule.legal import predecessors

_SOURCE, _SINK = "has run", "has not run"


def least_at(graph: Graph, op: int) -> int:
    """The fewest bytes of planned storages that can be alive while `op` (an index) runs, over all legal orders.

    A result of `op` may take the bytes of an input that nothing needs later: one cut for each such chance.
    """
    node = _sides(graph, op)
    users = _users(graph)
    own = {storage for storage in graph.touched(graph.ops[op]) if storage in users}
    fixed = sum(graph.storages[storage].nbytes for storage in own)
    least = fixed + _cut(graph, node, users, own)
    for result, read in graph.ops[op].chances:
        host = graph.values[read].storage
        others = [node[user] for user in users.get(host, ()) if user != op]
        if host in own and _SINK not in others:
            saved = graph.storages[graph.values[result].storage].nbytes
            least = min(least, fixed - saved + _cut(graph, node, users, own, (others, saved)))
    return least


def between_phases(graph: Graph) -> int:
    """The bytes of planned storages alive between forward and backward: the same in every order."""
    kept = _kept(graph)
    total = 0
    for storage, ops in _users(graph).items():
        phases = {graph.ops[op].phase for op in ops}
        if Phase.FORWARD in phases and (Phase.BACKWARD in phases or storage in kept):
            total += graph.storages[storage].nbytes
    return total


def _kept(graph: Graph) -> set[int]:
    """Storages that the caller keeps: alive to the end."""
    return {graph.values[value].storage for value in (*graph.outputs, *graph.gradients)}


def _users(graph: Graph) -> dict[int, list[int]]:
    """Planned storage -> the ops that touch it."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for storage in graph.touched(op):
            if graph.storages[storage].planned:
                users.setdefault(storage, []).append(index)
    return users


def _sides(graph: Graph, op: int) -> list[Any]:
    """The node of each op: the source where it must run before `op`, the sink where it cannot, else one of its own."""
    before = predecessors(graph)
    after: list[list[int]] = [[] for _ in graph.ops]
    for index, needed in enumerate(before):
        for other in needed:
            after[other].append(index)
    phase = graph.ops[op].phase
    forward = [i for i, o in enumerate(graph.ops) if o.phase is Phase.FORWARD]
    backward = [i for i, o in enumerate(graph.ops) if o.phase is Phase.BACKWARD]
    earlier = _reached(before, [op, *(forward if phase is Phase.BACKWARD else ())]) - {op}
    later = _reached(after, [op, *(backward if phase is Phase.FORWARD else ())])
    return [_SOURCE if i in earlier else _SINK if i in later else ("op", i) for i in range(len(graph.ops))]


def _reached(step: Sequence[Iterable[int]], start: Iterable[int]) -> set[int]:
    """`start` and all that follows from it by `step`."""
    found = set(start)
    left = list(found)
    while left:
        new = set(step[left.pop()]) - found
        found |= new
        left += new
    return found


def _cut(
    graph: Graph,
    node: Sequence[Any],
    users: Mapping[int, Sequence[int]],
    own: set[int],
    chance: tuple[Sequence[Any], int] | None = None,
) -> int:
    """The least bytes alive of storages that are not in `own`; and of `chance`, (nodes, bytes), those bytes unless all
    of its nodes have run."""
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
    if chance is not None:
        nodes, saved = chance
        network.add_edges_from(("last", n) for n in nodes)
        network.add_edge(_SOURCE, "last", capacity=saved)
    least, _ = networkx.minimum_cut(network, _SOURCE, _SINK)
    return int(least)
