"""Lower bounds of max live over every legal order of a graph's ops.

The *cut* at an op v (FINDINGS 7). Whatever the order, the ops that ran before v are an ideal I: with each
op it holds all that must run before it. What v touches is alive while v runs, and so is every storage whose
producer is in I and whose last user is not; the sum is submodular in I, and its least value over all ideals
that v allows is one minimum cut. No order can do with less at v. A result of v that may take the bytes of
an input is alive beside it only if something else touches that input later, which is one storage more in the
network; with several such inputs, one cut for each, and the least of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from memplan.core.graph import Graph

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from memplan.schedule.arrays.graph_arrays import GraphArrays, Ints


_INTERPRETED = 5000  # ops: one cut alone is sooner found than numba imported


def cut_bound(graph: Graph, op: int | None) -> int:
    """Bytes that any legal order needs while `op` (an index into the graph's ops) runs; None: after the forward."""
    from memplan.schedule.arrays.graph_arrays import make_core

    core = make_core(graph)
    number = core.barrier if op is None else op + (op >= core.barrier)
    return cut(core, number, interpreted=core.n < _INTERPRETED).bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """The least cut at `op`: with `ideal` (True for what runs before) and no other ideal does it need less
    than `bytes`; of several the smallest. `work` is what it took, in arcs looked at."""

    op: int
    bytes: int
    ideal: npt.NDArray[np.bool_]
    work: int


def cut(core: GraphArrays, op: int, *, before: int = -1, after: int = -1, interpreted: bool = False) -> Cut:
    """The least bytes alive while `op` (of the core) runs, over all ideals before it.

    With `before` (`after`), an op that may run on either side: over those ideals in which it has run (has not).
    """
    from memplan.schedule.bounds.cut_kernel import AFTER, sides_of

    c, ops = core, 0 if interpreted else core.n
    side = sides_of(ops, op, before, after, c.pred_ptr, c.pred, c.succ_ptr, c.succ)
    best, work = None, 0
    for chance in range(c.chance_ptr[op], c.chance_ptr[op + 1]):
        host = c.host[chance]
        users = c.user[c.user_ptr[host] : c.user_ptr[host + 1]]
        if not (side[users[users != op]] == AFTER).any():  # else the input outlives the op
            found = _least(core, op, side, (int(host), int(c.saved[chance])), ops)
            work += found.work
            best = found if best is None or found.bytes < best.bytes else best
    if best is None:
        return _least(core, op, side, (-1, 0), ops)
    return replace(best, work=work)


def _least(core: GraphArrays, op: int, side: Ints, chance: tuple[int, int], ops: int) -> Cut:
    """The least cut at `op` with one chance: a storage (-1: none), and the bytes saved where the op is its last."""
    from memplan.schedule.bounds.cut_kernel import BEFORE, network
    from memplan.schedule.bounds.flow_kernel import max_flow

    c = core
    nodes, tail, head, capacity, fixed, node = network(
        *(ops, op, side, *chance, c.pred_ptr, c.pred, c.touch_ptr, c.touch, c.user_ptr, c.user, c.size, c.kept)
    )
    flow, near, work = max_flow(ops, nodes, tail, head, capacity)
    ideal = near[node[: c.n]] & (side >= 0) | (side == BEFORE)
    looked_at = int(work) + 2 * (c.n + len(c.pred) + len(c.user))
    return Cut(op=op, bytes=int(fixed + flow), ideal=ideal, work=looked_at)
