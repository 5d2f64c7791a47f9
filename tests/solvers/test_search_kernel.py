"""The tree search: its outcomes are those of an exact solver, and its effort on fixed problems is recorded."""

from __future__ import annotations

import numpy as np
import pytest

from memplan.core.problem import Problem
from memplan.core.validate import validate
from memplan.solvers import search_kernel as kernel
from memplan.solvers import thresholds
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, instance_of, make_problem_arrays
from memplan.solvers.base import finish
from memplan.solvers.tree_search import RULES
from tests.solvers.small import decide, small_problem


def _run(
    piece: Instance, way: tuple[int, bool], *, nodes: int = 5_000, table: Ints | None = None
) -> tuple[int, int, int, Ints]:
    """(status, nodes, smallest unplaced area, offsets), by descending size."""
    arrays, (few, corners) = piece.arrays, way
    rank, offsets = np.empty(arrays.n, np.int64), np.full(arrays.n, -1, np.int64)
    rank[np.argsort(-arrays.size, kind="stable")] = np.arange(arrays.n)
    status, spent, area = kernel.search(
        int((piece.max_offset + arrays.size).max()), arrays.size, arrays.align, arrays.low, piece.max_offset,
        arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi, arrays.sections, piece.adj_ptr, piece.adj, piece.mem_ptr,
        piece.mem, rank, few, corners, nodes, thresholds.ROOM, thresholds.ROUNDS,
        np.zeros(1 << 10, np.int64) if table is None else table, offsets,
    )  # fmt: skip
    return int(status), int(spent), int(area), offsets


def _piece(seed: int, capacity: int) -> tuple[Problem, Instance]:
    problem = small_problem(seed, most=14, pins=True)
    arrays = make_problem_arrays(problem)
    return problem, instance_of(arrays, arrays.max_offset(capacity))


# (seed, capacity) -> the nodes of each way on its own, and of each after the others with a common table.
_EFFORT = {
    (10, 30): ([74, 68, 82, 85], [74, 16, 16, 23]),
    (20, 32): ([95, 89, 88, 107], [95, 1, 1, 1]),
    (78, 37): ([33, 36, 44, 32], [33, 1, 1, 1]),
    (231, 38): ([25, 25, 28, 17], [25, 18, 28, 17]),
    (289, 24): ([112, 25, 23, 28], [112, 25, 21, 28]),
    (383, 29): ([42, 42, 40, 9], [42, 14, 12, 9]),
    (122, 44): ([12, 10, 10, 41], [12, 10, 10, 41]),
}


@pytest.mark.parametrize(("seed", "capacity"), list(_EFFORT))
def test_the_nodes_for_a_fixed_problem_with_every_rule(seed: int, capacity: int) -> None:
    """Recorded, and the same on every machine: fewer nodes are an improvement to record, more are weaker pruning."""
    problem, piece = _piece(seed, capacity)
    expected = decide(piece.arrays, piece.max_offset)
    alone, together = [], []
    table = np.zeros(1 << 10, np.int64)
    for way in RULES:
        status, nodes, area, offsets = _run(piece, way)
        again = _run(piece, way, table=table)
        assert status == again[0] == {PieceOutcome.SOLVED: kernel.SOLVED}.get(expected, kernel.EXHAUSTED)
        if status == kernel.SOLVED:
            assert area == 0
            placed = {
                problem.buffers[i].id: int(at) * piece.arrays.unit
                for i, at in zip(piece.arrays.source, offsets, strict=True)
            }
            validate(problem, finish(problem, placed, solver="search", seconds=0.0))
        alone.append(nodes)
        together.append(again[1])
    assert (alone, together) == _EFFORT[seed, capacity]


@pytest.mark.parametrize("way", RULES)
def test_a_limit_of_nodes_ends_the_search_with_the_smallest_unplaced_area(way: tuple[int, bool]) -> None:
    _, piece = _piece(20, 32)
    arrays = piece.arrays
    whole = int((arrays.size * np.add.reduceat(arrays.seg_hi - arrays.seg_lo, arrays.seg_ptr[:-1])).sum())
    _, needed, _, _ = _run(piece, way)
    areas = []
    for nodes in (0, 1, needed // 2, needed - 1):
        status, spent, area, _ = _run(piece, way, nodes=nodes)
        assert (status, spent) == (kernel.LIMIT, nodes + 1)
        areas.append(area)
    assert areas[0] == whole
    assert areas == sorted(areas, reverse=True)
    assert 0 < areas[-1] < whole
    assert _run(piece, way, nodes=needed)[0] == kernel.EXHAUSTED


def test_failed_states_are_remembered() -> None:
    _, piece = _piece(20, 32)
    table = np.zeros(1 << 10, np.int64)
    assert _run(piece, RULES[0], table=table)[1] > 1
    assert _run(piece, RULES[0], table=table)[1] == 1  # the root itself failed


def test_a_capacity_below_the_load_or_below_a_pin_needs_no_node() -> None:
    problem, piece = _piece(20, 32)
    arrays = piece.arrays
    low = instance_of(arrays, arrays.max_offset(problem.max_live - 1))
    assert _run(low, RULES[0])[:2] == (kernel.EXHAUSTED, 0)
    highest = piece.max_offset.copy()
    highest[3] = arrays.low[3] - 1
    status, nodes, area, _ = _run(instance_of(arrays, highest), RULES[0])
    assert (status, nodes) == (kernel.EXHAUSTED, 0)
    assert area > 0
