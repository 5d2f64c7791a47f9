"""The tree search: its outcomes are those of an exact solver, its effort on fixed problems is recorded, its keys."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memplan.core.problem import Problem
from memplan.core.validate import validate
from memplan.solvers import SolverLimits, branch_kernel, cpsat_model, thresholds
from memplan.solvers import search_kernel as kernel
from memplan.solvers.arrays import Instance, Ints, PieceOutcome, instance_of, make_problem_arrays
from memplan.solvers.base import WorkBudget, finish
from memplan.solvers.tree_search import RULES
from tests.solvers.small import small_problem


def _run(
    piece: Instance, way: tuple[int, bool], *, nodes: int = 5_000, table: Ints | None = None, salt: int = 1
) -> tuple[int, int, int, Ints]:
    """(status, nodes, smallest unplaced area, offsets), by descending size."""
    arrays, (few, corners) = piece.arrays, way
    rank, offsets = np.empty(arrays.n, np.int64), np.full(arrays.n, -1, np.int64)
    rank[np.argsort(-arrays.size, kind="stable")] = np.arange(arrays.n)
    status, spent, area = kernel.search(
        int((piece.max_offset + arrays.size).max()), arrays.size, arrays.align, arrays.low, piece.max_offset,
        arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi, arrays.sections, piece.adj_ptr, piece.adj, piece.mem_ptr,
        piece.mem, rank, few, corners, nodes, thresholds.ROOM, thresholds.ROUNDS,
        np.zeros(1 << 10, np.int64) if table is None else table, salt, offsets,
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
    (111, 35): ([52, 52, 25, 24], [52, 1, 1, 1]),
    (229, 30): ([53, 54, 52, 60], [53, 1, 1, 1]),
    (289, 24): ([112, 25, 23, 28], [112, 25, 21, 28]),
    (383, 29): ([42, 42, 40, 9], [42, 14, 12, 9]),
}


@pytest.mark.parametrize(("seed", "capacity"), list(_EFFORT))
def test_the_nodes_for_a_fixed_problem_with_every_rule(seed: int, capacity: int) -> None:
    """Recorded, and the same on every machine: fewer nodes are an improvement to record, more are weaker pruning."""
    problem, piece = _piece(seed, capacity)
    expected, _ = cpsat_model.decide(
        piece.arrays, piece.max_offset, piece.arrays.low, WorkBudget(SolverLimits(work=10**7))
    )
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


def _mixed(b: int, allowed: int, hole: int) -> int:
    """The key in exact arithmetic, wrapped to 64 bits: a hash of the three numbers, finished as splitmix64 does."""
    x = (b + 1) * -7046029254386353131 ^ (allowed + 1) * -4417276706812531889 ^ (hole + 2) * 1609587929392839161
    x %= 1 << 64
    x = (x ^ (x >> 31 & 0x1FFFFFFFF)) * -4658895280553007687 % (1 << 64)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685 % (1 << 64)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def test_keys_are_the_same_on_every_machine() -> None:
    """Likely joins are drawn with them: equal seeds must give equal plans, compiled or not."""
    chance = random.Random(0)
    for _ in range(300):
        b, allowed, hole = (chance.randrange(1 << bits) for bits in (12, 40, 40))
        assert int(branch_kernel.mix(b, allowed, hole - 1)) % (1 << 64) == _mixed(b, allowed, hole - 1)


def test_the_key_of_a_state_is_the_sum_over_its_unplaced_buffers() -> None:
    placed = np.array([False, False, False, False, True])
    allowed, hole = np.array([4, 5, 6, 7, 8]), np.array([-1, 3, -1, 2, 1])
    expected = 9 + sum(_mixed(b, int(allowed[b]), int(hole[b])) for b in range(4))
    assert (int(branch_kernel.key_of(9, placed, allowed, hole)) - expected) % (1 << 64) == 0
