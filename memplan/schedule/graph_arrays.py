"""A graph as flat arrays, the input of every policy and bound.

Ops are numbered in traced order, with one additional op: the *barrier*, which touches nothing and is between the ops of
the forward and those of the backward, where the caller computes the loss. The topological orders of these ops are
exactly the legal orders of the graph.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt

from memplan.core.graph import Graph
from memplan.core.legal_orders import predecessors

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class GraphArrays:
    """Ops 0..n-1 and storages 0..m-1 of a graph. Lists of lists are flat: row i is `x[x_ptr[i]:x_ptr[i + 1]]`.

    `pred` and `succ` are the ops that must run directly before and after an op, `touch` the planned storages that an op
    touches, `user` the ops that touch a storage, in traced order. `size` is in bytes. `kept` is 1 for a storage alive
    after the last op. Storages touched by the same ops are merged. `chance_ptr` gives the in-place candidates of each
    op: if the op is the last to touch `donor`, then `saved` bytes less are alive while it runs (the largest of its
    candidates counts).
    """

    barrier: int
    pred_ptr: Ints
    pred: Ints
    succ_ptr: Ints
    succ: Ints
    touch_ptr: Ints
    touch: Ints
    user_ptr: Ints
    user: Ints
    size: Ints
    kept: Ints
    chance_ptr: Ints
    donor: Ints
    saved: Ints

    @property
    def n(self) -> int:
        """The number of ops, the barrier included."""
        return int(self.touch_ptr.shape[0]) - 1

    @property
    def m(self) -> int:
        """The number of storages."""
        return int(self.size.shape[0])

    @property
    def traced(self) -> Ints:
        """The traced order."""
        return np.arange(self.n)

    @cached_property
    def working_set(self) -> Ints:
        """Bytes that each op touches, less those saved in place."""
        total = np.concatenate(([0], np.cumsum(self.size[self.touch])))
        less = np.zeros(self.n, np.int64)
        np.maximum.at(less, self.taker, self.saved)
        return np.asarray(total[self.touch_ptr[1:]] - total[self.touch_ptr[:-1]] - less, np.int64)

    @cached_property
    def taker(self) -> Ints:
        """The op of each in-place candidate."""
        return np.repeat(np.arange(self.n), np.diff(self.chance_ptr))

    def graph_order(self, order: Ints) -> tuple[int, ...]:
        """Return the order `order` of these arrays as indices of the graph's ops, without the barrier."""
        real = order[order != self.barrier]
        return tuple((real - (real > self.barrier)).tolist())

    def graph_op(self, op: int) -> int:
        """Return the graph's index of an op other than the barrier."""
        return op - (op > self.barrier)


def make_graph_arrays(graph: Graph) -> GraphArrays:
    """Return the arrays of `graph`. Linear in its ops and the storages that they touch."""
    barrier = graph.forward_ops
    before = [frozenset(p + (p >= barrier) for p in found) for found in predecessors(graph)]
    pred = _with_barrier(before, barrier)
    succ: list[list[int]] = [[] for _ in pred]
    for number, needed in enumerate(pred):
        for p in needed:
            succ[p].append(number)
    users: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        for storage in graph.touched(op):
            if graph.storages[storage].planned and graph.storages[storage].nbytes:
                users.setdefault(storage, []).append(index + (index >= barrier))
    return _assemble(graph, barrier, pred, succ, users)


def _with_barrier(before: list[frozenset[int]], barrier: int) -> list[list[int]]:
    """Return the predecessors with the barrier between the phases, which replaces every edge between them."""
    forward = before[:barrier]
    needed = frozenset().union(*forward) if forward else frozenset()
    last = [op for op in range(barrier) if op not in needed]
    rows = [sorted(found) for found in forward] + [last]
    return rows + [sorted(p for p in found if p > barrier) or [barrier] for found in before[barrier:]]


def _assemble(
    graph: Graph, barrier: int, pred: list[list[int]], succ: list[list[int]], users: dict[int, list[int]]
) -> GraphArrays:
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    merged: dict[tuple[tuple[int, ...], bool], int] = {}
    for storage, ops in users.items():
        key = (tuple(ops), storage in kept)
        merged[key] = merged.get(key, 0) + graph.storages[storage].nbytes
    number = {key: i for i, key in enumerate(merged)}
    inplace_candidates: list[dict[int, int]] = [{} for _ in pred]
    for index, op in enumerate(graph.ops):
        for result, read in op.inplace_candidates:
            donor = graph.values[read].storage
            saved = graph.storages[graph.values[result].storage].nbytes
            if donor in users:
                row, at = inplace_candidates[index + (index >= barrier)], number[tuple(users[donor]), donor in kept]
                row[at] = max(saved, row.get(at, 0))
    touch: list[list[int]] = [[] for _ in pred]
    for (ops_, _), storage in number.items():
        for op_ in ops_:
            touch[op_].append(storage)
    pred_ptr, pred_flat = _flat(pred)
    succ_ptr, succ_flat = _flat(succ)
    touch_ptr, touch_flat = _flat(touch)
    user_ptr, user_flat = _flat(ops for ops, _ in merged)
    chance_ptr, chance_flat = _flat([list(row.items()) for row in inplace_candidates])
    return GraphArrays(
        barrier=barrier,
        pred_ptr=pred_ptr,
        pred=pred_flat,
        succ_ptr=succ_ptr,
        succ=succ_flat,
        touch_ptr=touch_ptr,
        touch=touch_flat,
        user_ptr=user_ptr,
        user=user_flat,
        size=np.array(list(merged.values()), np.int64),
        kept=np.array([keep for _, keep in merged], np.int64),
        chance_ptr=chance_ptr,
        donor=chance_flat.reshape(-1, 2)[:, 0].copy(),
        saved=chance_flat.reshape(-1, 2)[:, 1].copy(),
    )


def _flat(rows: Iterable[Sequence[Any]]) -> tuple[Ints, Ints]:
    listed = list(rows)
    ptr = np.array([0, *accumulate(map(len, listed))], np.int64)
    return ptr, np.array([item for row in listed for item in row], np.int64)


def step_bytes(arrays: GraphArrays, order: Ints) -> Ints:
    """Return the bytes that are alive at each step of `order`."""
    if not arrays.m:
        return np.zeros(arrays.n, np.int64)
    position = np.empty(arrays.n, np.int64)
    position[order] = np.arange(arrays.n)
    at = position[arrays.user]
    first = np.minimum.reduceat(at, arrays.user_ptr[:-1])
    last = np.where(arrays.kept, arrays.n - 1, np.maximum.reduceat(at, arrays.user_ptr[:-1]))
    change = np.zeros(arrays.n + 1, np.int64)
    np.add.at(change, first, arrays.size)
    np.subtract.at(change, last + 1, arrays.size)
    taken = last[arrays.donor] == position[arrays.taker]
    less = np.zeros(arrays.n, np.int64)
    np.maximum.at(less, position[arrays.taker[taken]], arrays.saved[taken])
    return np.asarray(np.cumsum(change[:-1]) - less, np.int64)
