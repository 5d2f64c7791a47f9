"""The parts of ejection search against their definitions, and its effort on fixed problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.instances import planted
from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import SolverLimits
from memplan.solvers.arrays.instance import Instance, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, make_problem_arrays
from memplan.solvers.limits import WorkBudget
from memplan.solvers.search import eject_kernel
from memplan.solvers.search.eject import Ejection, Learnt
from tests.solvers.small import alive_together, small_cores

_kernel: Any = eject_kernel
_STATES = range(40)  # seeds of the random generator: enough that every offset of a small problem is drawn


def test_draws_are_those_of_the_mmix_generator() -> None:
    state = np.array([7], np.int64)
    expected = 7
    for below in (1, 2, 3, 4, 1000, 1 << 30):
        expected = (expected * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        assert eject_kernel._draw(state, below) == (expected >> 33) % below
        assert int(state[0]) % (1 << 64) == expected


def test_sorted_lists_are_kept_sorted() -> None:
    for seed in range(40):
        chance = random.Random(seed)
        n = 9
        key = np.array([chance.randrange(6) for _ in range(n)], np.int64)
        order = np.full(n, -1, np.int64)
        inside: list[int] = []
        for b in chance.sample(range(n), n):
            eject_kernel._put_in(b, key[b], len(inside), order, key)
            inside.append(b)
            kept = order[: len(inside)].tolist()
            assert sorted(kept) == sorted(inside)
            assert key[kept].tolist() == sorted(key[inside].tolist())
            for end in range(7):
                assert eject_kernel._first(end, len(inside), order, key) == sum(k < end for k in key[inside].tolist())
        for b in chance.sample(range(n), n):
            before = order[: len(inside)].tolist()
            eject_kernel._take_out(b, key[b], len(inside), order, key)
            inside.remove(b)
            before.remove(b)
            assert order[: len(inside)].tolist() == before


def _states() -> Iterator[tuple[int, Instance, Ints, list[int]]]:
    """(seed, piece, offsets of a valid part of a placement or -1, the unplaced buffers)."""
    for seed, arrays in small_cores(70, most=10):
        chance = random.Random(seed)
        lifted = replace(arrays, low=arrays.low + arrays.align * (seed % 3))
        piece = instance_of(lifted, lifted.max_offset(int(arrays.raw.max()) + chance.randint(3, 25) * arrays.unit))
        offsets = np.full(arrays.n, -1, np.int64)
        for b in chance.sample(range(arrays.n), arrays.n - 1):
            places = [
                at for at in range(40) if at % arrays.align[b] == 0 and lifted.low[b] <= at <= piece.max_offset[b]
            ]
            valid = [at for at in places if not _met(piece, offsets, b, at)]
            if valid:
                offsets[b] = chance.choice(valid)
        waiting = np.flatnonzero(offsets < 0).tolist()
        if (piece.max_offset >= lifted.low).all():
            yield seed, piece, offsets, waiting


def _met(piece: Instance, offsets: Ints, b: int, at: int) -> list[int]:
    """The placed buffers that `b` overlaps at `at`."""
    arrays = piece.arrays
    return [
        c
        for c in range(arrays.n)
        if c != b
        and offsets[c] >= 0
        and alive_together(arrays, b, c)
        and offsets[c] < at + arrays.size[b]
        and at < offsets[c] + arrays.size[c]
    ]


def _arguments(piece: Instance, offsets: Ints) -> tuple[list[Ints], np.ndarray, list[Ints], int, Ints]:
    """(size to maxoff, who meets whom, order by bottom and by top, the number placed, tops)."""
    arrays = piece.arrays
    meets = np.array([[b != c and alive_together(arrays, b, c) for c in range(arrays.n)] for b in range(arrays.n)])
    top = np.where(offsets < 0, -1, offsets + arrays.size)
    placed = np.flatnonzero(offsets >= 0)
    orders = [np.zeros(arrays.n, np.int64) for _ in range(2)]
    for order, key in zip(orders, (offsets, top), strict=True):
        order[: len(placed)] = placed[np.argsort(key[placed], kind="stable")]
    return [arrays.size, arrays.align, arrays.low, piece.max_offset], meets, orders, len(placed), top


def _ends(places: list[int], step: int) -> set[int]:
    """The first and last multiple of `step` in every run of consecutive `places`."""
    runs: list[list[int]] = []
    for at in places:
        if not runs or at != runs[-1][-1] + 1:
            runs.append([])
        runs[-1].append(at)
    aligned = [[at for at in run if at % step == 0] for run in runs]
    return {end for run in aligned if run for end in (run[0], run[-1])}


def test_a_free_place_is_any_end_of_a_free_range() -> None:
    none = 0
    for seed, piece, offsets, waiting in _states():
        arrays = piece.arrays
        columns, meets, (by_bottom, _), count, top = _arguments(piece, offsets)
        for b in waiting[:2]:
            allowed = range(int(arrays.low[b]), int(piece.max_offset[b]) + 1)
            ends = _ends([at for at in allowed if not _met(piece, offsets, b, at)], int(arrays.align[b]))
            found = {
                int(_kernel._free_place(b, *columns, meets, by_bottom, count, offsets, top, np.array([s])))
                for s in _STATES
            }
            assert found <= (ends or {-1}), seed
            assert len(found) >= min(len(ends), 2), seed
            none += not ends
    assert none > 10


def test_the_cheapest_place_ejects_the_smallest_total_penalty() -> None:
    for seed, piece, offsets, waiting in _states():
        arrays = piece.arrays
        columns, meets, (by_bottom, by_top), count, top = _arguments(piece, offsets)
        penalty = np.array([random.Random(seed + b).randint(1, 5) for b in range(arrays.n)], np.int64)
        for b in waiting[:2]:
            places = range(int(arrays.low[b]), int(piece.max_offset[b]) + 1, int(arrays.align[b]))
            cost = {at: int(penalty[_met(piece, offsets, b, at)].sum()) for at in places}
            cheapest = [at for at in places if cost[at] == min(cost.values())]
            found = set()
            for state in _STATES:
                at, weight = _kernel._cheapest_place(
                    b, *columns, meets, penalty, by_bottom, by_top, count, offsets, top, np.array([state])
                )
                assert weight == min(cost.values()), seed
                found.add(int(at))
            assert found <= set(cheapest), seed
            assert len(found) >= min(len(cheapest), 2), seed


def test_nothing_is_placed_where_no_offset_is_allowed() -> None:
    columns = [np.array([2]), np.array([4]), np.array([1]), np.array([3])]  # no multiple of 4 from 1 to 3
    empty = np.zeros(1, np.int64)
    meets = np.zeros((1, 1), np.bool_)
    assert _kernel._free_place(0, *columns, meets, empty, 0, empty, empty, np.array([1])) == -1
    at, weight = _kernel._cheapest_place(0, *columns, meets, empty, empty, empty, 0, empty, empty, np.array([1]))
    assert (at, weight) == (-1, 1 << 62)


def _stack(*sizes: int) -> Instance:
    """Buffers that are all alive together, under the sum of their sizes."""
    made = tuple(Buffer(id=str(i), size=size, live=Interval(0, 1)) for i, size in enumerate(sizes))
    arrays = make_problem_arrays(Problem(buffers=made))
    return instance_of(arrays, arrays.max_offset(sum(sizes)))


def _eject(piece: Instance, turns: int, moves: int, penalty: Ints, offsets: Ints, *, seed: int = 1) -> tuple[int, int]:
    arrays = piece.arrays
    area = arrays.size * (arrays.hi - arrays.lo)
    taken, left = eject_kernel.eject(
        arrays.size, arrays.align, arrays.low, piece.max_offset, piece.adj_ptr, piece.adj, area, turns, moves, penalty,
        offsets, np.array([seed], np.int64),
    )  # fmt: skip
    return int(taken), int(left)


def test_an_insertion_without_overlap_ejects_nothing_and_costs_no_penalty() -> None:
    piece = _stack(3, 5, 7)
    penalty, offsets = np.array([1, 1, 1]), np.array([0, -1, 8])
    assert _eject(piece, 9, 4, penalty, offsets) == (1, 0)
    assert (offsets.tolist(), penalty.tolist()) == ([0, 3, 8], [1, 1, 1])
    assert _eject(piece, 9, 4, penalty, offsets) == (0, 0)


def test_the_buffer_that_ejects_gains_its_area_as_penalty_and_the_least_unplaced_area_is_returned() -> None:
    piece = _stack(3, 5, 7)
    penalty, offsets = np.array([1, 1, 9]), np.array([2, -1, 8])  # 5 units fit nowhere: it ejects the buffer of 3
    assert _eject(piece, 0, 4, penalty, offsets) == (0, 5)
    assert _eject(piece, 1, 0, penalty, offsets) == (1, 3)
    assert penalty.tolist() == [1, 1 + 5, 9]
    assert offsets[0] == -1
    assert 0 <= offsets[1] <= 3
    assert offsets[2] == 8


def test_neighbours_move_after_an_ejection() -> None:
    piece = _stack(3, 5, 7)
    moved = 0
    for seed in _STATES:
        ends = []
        for moves in (0, 4):
            penalty, offsets = np.array([1, 1, 9]), np.array([2, -1, 8])
            _eject(piece, 1, moves, penalty, offsets, seed=seed)
            ends.append(int(offsets[2]))
        assert ends[0] == 8
        moved += ends[1] != 8
    assert moved > 0


@pytest.mark.parametrize(("count", "seed", "density", "work"), [(40, 1, 0.9, 178), (40, 2, 1.0, 372), (60, 1, 0.8, 91)])
def test_the_work_until_a_fixed_problem_is_placed(count: int, seed: int, density: float, work: int) -> None:
    """Recorded, and the same on every machine: less is an improvement to record, more is a weaker search."""
    arrays = make_problem_arrays(planted(count, seed=seed, density=density))
    piece = instance_of(arrays, arrays.max_offset(1100))
    budget = WorkBudget(SolverLimits(work=5_000))
    assert Ejection(piece, 0, Learnt(np.full(arrays.n, -1, np.int64))).run(5_000, budget)
    assert budget.spent == work
