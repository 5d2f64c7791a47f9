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
from typing import TYPE_CHECKING

from memplan.core.graph import Graph
from memplan.errors import MemplanError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from memplan.schedule.graph_arrays import GraphArrays, Ints


_INTERPRETED = 5000  # ops: up to here building a single network takes less time than importing numba
_VISITS = 6  # arcs that a flow visits for each arc of its network: the mean of shortest augmenting paths on models


def cut_bound(graph: Graph, op: int | None) -> int:
    """Return the bytes that every legal order needs while `op` (an index into the graph's ops) runs.

    If `op` is None: the bytes that every order needs between forward and backward.
    """
    from memplan.schedule.graph_arrays import make_graph_arrays

    arrays = make_graph_arrays(graph)
    number = arrays.barrier if op is None else op + (op >= arrays.barrier)
    return cut(arrays, number, interpreted=arrays.n < _INTERPRETED).bytes


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


def cut(arrays: GraphArrays, op: int, *, interpreted: bool = False) -> Cut:
    """Return the minimum cut at `op` (a number of the arrays): the fewest bytes alive meanwhile, over all ideals."""
    from memplan.schedule.cut_kernel import AFTER, sides_of

    c, ops = arrays, 0 if interpreted else arrays.n
    side = sides_of(ops, op, c.pred_ptr, c.pred, c.succ_ptr, c.succ)
    best, work = None, 0
    for chance in range(c.chance_ptr[op], c.chance_ptr[op + 1]):
        donor = c.donor[chance]
        users = c.user[c.user_ptr[donor] : c.user_ptr[donor + 1]]
        if not (side[users[users != op]] == AFTER).any():  # otherwise the input is still alive after the op
            found = _least(arrays, op, side, (int(donor), int(c.saved[chance])), ops)
            work += found.work
            best = found if best is None or found.bytes < best.bytes else best
    if best is None:
        return _least(arrays, op, side, (-1, 0), ops)
    return replace(best, work=work)


def _least(arrays: GraphArrays, op: int, side: Ints, chance: tuple[int, int], ops: int) -> Cut:
    """Return the minimum cut at `op` with one in-place candidate: its storage (-1 for none), and the bytes that it
    saves if `op` is the last to touch that storage.
    """
    from memplan.schedule.cut_kernel import BEFORE, network

    c = arrays
    nodes, tail, head, capacity, fixed, node = network(
        *(ops, op, side, *chance, c.pred_ptr, c.pred, c.touch_ptr, c.touch, c.user_ptr, c.user, c.size, c.kept)
    )
    flow, near = min_cut(nodes, tail, head, capacity)
    ideal = near[node[: c.n]] & (side >= 0) | (side == BEFORE)
    looked_at = _VISITS * len(tail) + 2 * (c.n + len(c.pred) + len(c.user))
    return Cut(op=op, bytes=int(fixed + flow), ideal=ideal, work=looked_at)


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
