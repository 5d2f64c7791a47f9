"""Lower bounds of max live over all legal orders of a graph's ops, by minimum cuts.

In every order, the ops that ran before an op v are an ideal I: with each op, I contains all its predecessors. While v
runs, the storages that v touches are alive, and so is every storage whose producer is in I and whose last user is not.
The sum of their sizes is submodular in I. Its minimum over all ideals that v allows is one minimum cut, the *cut* at v,
and no order needs fewer bytes at v. A result of v that may take the bytes of an input adds its size only if another op
touches that input later: the network has one more storage for this. With several such inputs there is one cut for each,
and the smallest counts.

The maximum flows are those of OR-Tools (`SimpleMaxFlow`), which does not say how much it worked: the work of a cut is
counted by the size of its network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from memplan.core.graph import Graph
from memplan.errors import MemplanError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from memplan.schedule.graph_arrays import GraphArrays, Ints


BEFORE, FREE, AFTER = 1, 0, -1
_VISITS = 6  # arcs that a flow visits for each arc of its network: the mean of shortest augmenting paths on models


def cut_bound(graph: Graph, op: int | None) -> int:
    """Return the bytes that every legal order needs while `op` (an index into the graph's ops) runs.

    If `op` is None: the bytes that every order needs between forward and backward.
    """
    from memplan.schedule.graph_arrays import make_graph_arrays

    arrays = make_graph_arrays(graph)
    number = arrays.barrier if op is None else op + (op >= arrays.barrier)
    return cut(arrays, number).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The minimum cut at `op`: no ideal before it needs fewer than `bytes`.

    `ideal` is the smallest ideal that needs `bytes` (True for the ops that run before `op`). `work` is an estimate of
    the number of arcs visited, which depends on the graph alone.
    """

    op: int
    bytes: int
    ideal: npt.NDArray[np.bool_]
    work: int


def cut(arrays: GraphArrays, op: int) -> Cut:
    """Return the minimum cut at `op` (a number of the arrays): the fewest bytes alive meanwhile, over all ideals."""
    import numpy as np

    side = np.zeros(arrays.n, np.int64)
    for ptr, flat, what in ((arrays.pred_ptr, arrays.pred, BEFORE), (arrays.succ_ptr, arrays.succ, AFTER)):
        side[_reached(op, ptr.tolist(), flat.tolist())] = what
    side[op] = AFTER
    best, work = None, 0
    for chance in range(arrays.chance_ptr[op], arrays.chance_ptr[op + 1]):
        donor = arrays.donor[chance]
        users = arrays.user[arrays.user_ptr[donor] : arrays.user_ptr[donor + 1]]
        if not (side[users[users != op]] == AFTER).any():  # otherwise the input is still alive after the op
            found = _least(arrays, op, side, (int(donor), int(arrays.saved[chance])))
            work += found.work
            best = found if best is None or found.bytes < best.bytes else best
    if best is None:
        return _least(arrays, op, side, None)
    return replace(best, work=work)


def _reached(op: int, ptr: list[int], flat: list[int]) -> list[int]:
    """Return the ops that are reached from `op`, itself included."""
    found, stack = {op}, [op]
    while stack:
        top = stack.pop()
        new = [other for other in flat[ptr[top] : ptr[top + 1]] if other not in found]
        found.update(new)
        stack += new
    return list(found)


def _least(arrays: GraphArrays, op: int, side: Ints, chance: tuple[int, int] | None) -> Cut:
    """Return the minimum cut at `op` with one in-place candidate: its storage, and the bytes that it saves if `op` is
    the last to touch that storage.

    `side` is BEFORE for the ops that must run before `op`, AFTER for `op` and those after it, else FREE. Node 0, the
    source, is all ops that run before `op`; node 1, the sink, is `op` and all ops after it. FREE ops, and storages
    whose last use may be on either side, have nodes of their own. An op on the source's side runs before `op`, and so
    do its predecessors. A storage is alive if its producer is on the source's side and its last user is not: its bytes
    are the capacity of the arc from the producer, and arcs of infinite capacity keep all users on the storage's side.
    The bytes of an in-place candidate are modelled as a storage that is alive until all other users of it have run.
    """
    import numpy as np

    free = side == FREE
    node = np.where(free, 1 + np.cumsum(free), side == AFTER)
    nodes, infinite = 2 + int(free.sum()), int(arrays.size.sum()) + 1
    later = np.repeat(np.arange(arrays.n), np.diff(arrays.pred_ptr))
    ordered = free[later] & free[arrays.pred]
    arcs, fixed, nodes = _storages(arrays, op, node, nodes) if arrays.m else ([], 0, nodes)
    arcs = [(node[later[ordered]], node[arrays.pred[ordered]], infinite), *arcs]
    if chance is not None:
        donor, saved = chance
        users = node[arrays.user[arrays.user_ptr[donor] : arrays.user_ptr[donor + 1]]]
        users = users[users > 1]
        fixed -= saved
        if len(users):
            arcs += [(np.full_like(users, nodes), users, infinite), (np.zeros(1, np.int64), np.array([nodes]), saved)]
            nodes += 1
    tail, head = (np.concatenate([arc[k] for arc in arcs]) for k in range(2))
    capacity = np.concatenate([np.broadcast_to(arc[2], arc[0].shape) for arc in arcs])
    flow, near = min_cut(nodes, tail, head, capacity)
    looked_at = _VISITS * len(tail) + 2 * (arrays.n + len(arrays.pred) + len(arrays.user))
    return Cut(op=op, bytes=fixed + flow, ideal=near[node] & (side >= 0) | (side == BEFORE), work=looked_at)


_Arc = tuple[Any, Any, Any]  # tails, heads, capacities


def _storages(arrays: GraphArrays, op: int, node: Ints, nodes: int) -> tuple[list[_Arc], int, int]:
    """Return the arcs of the storages, the bytes that are alive at `op` in any case, and the number of nodes."""
    import numpy as np

    c, first = arrays, arrays.user_ptr[:-1]
    at = node[c.user]
    origin = at[first]
    at[first] = 0  # from here on, of the users after the producer
    own = np.zeros(c.m, np.bool_)  # touched by op
    own[c.touch[c.touch_ptr[op] : c.touch_ptr[op + 1]]] = True
    needed = np.maximum.reduceat(at == 1, first) | (c.kept > 0)  # by the sink
    candidates = ~own & (origin != 1)
    either = candidates & ~needed & (np.maximum.reduceat(at, first) > 0)  # its last use may be on either side
    end = np.where(either, nodes - 1 + np.cumsum(either), 1)
    arced = either | (candidates & needed & (origin > 1))
    uses = np.repeat(either, np.diff(c.user_ptr)) & (at != 0)
    arcs = [
        (np.repeat(end, np.diff(c.user_ptr))[uses], at[uses], int(c.size.sum()) + 1),
        (origin[arced], end[arced], c.size[arced]),
    ]
    fixed = int(c.size[own | (candidates & needed & (origin == 0))].sum())
    return arcs, fixed, nodes + int(either.sum())


def min_cut(nodes: int, tail: Ints, head: Ints, capacity: Ints) -> tuple[int, npt.NDArray[np.bool_]]:
    """Return the maximum flow from node 0 to node 1, and for each node whether it is on the source's side of the cut.

    Of several minimum cuts it is the one nearest to the source. Arc i goes from `tail[i]` to `head[i]`.
    """
    import numpy as np
    from ortools.graph.python.max_flow import SimpleMaxFlow

    solver, near = SimpleMaxFlow(), np.zeros(nodes, np.bool_)
    near[0] = True
    solver.add_arcs_with_capacity(tail, head, capacity)
    if solver.num_nodes() < 2:  # no arcs
        return 0, near
    status = solver.solve(0, 1)
    if status != SimpleMaxFlow.OPTIMAL:
        raise MemplanError(f"a minimum cut of {len(tail)} arcs ended as {status.name}", hint="use schedule='traced'")
    near[solver.get_source_side_min_cut()] = True
    return solver.optimal_flow(), near
