"""Solvers of one rule each, against their rules."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest

from benchmarks.baselines import BASELINES, hill_climb
from benchmarks.baselines.hill_climb import HillClimb
from benchmarks.baselines.tlsf import _Pool, class_of_request, size_class
from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import SolverLimits, solve
from memplan.solvers.baselines import in_order, partitions
from tests.solvers.small import small_problem


def _problem(*rows: tuple[int, int, int], alignment: int = 1) -> Problem:
    """Buffers (size, start, end), named by their place."""
    return Problem(
        buffers=tuple(
            Buffer(id=str(i), size=size, live=Interval(a, b), alignment=alignment)
            for i, (size, a, b) in enumerate(rows)
        )
    )


def _offsets(solver: str, problem: Problem) -> list[int]:
    found = solve(problem, solver=BASELINES.get(solver, solver)).offsets
    return [found[b.id] for b in problem.buffers]


def _free_offset(b: Buffer, placed: list[tuple[int, Buffer]], *, best: bool) -> int:
    """The lowest, or tightest, aligned offset at which `b` overlaps nothing placed."""
    met = [(at, at + o.size) for at, o in placed if any(not s.is_disjoint(t) for s in b.segments for t in o.segments)]
    taken = {byte for low, high in met for byte in range(low, high)}
    found: list[tuple[int, int]] = []
    for at in range(max(taken, default=0) + b.alignment + 1):
        new = not found or any(byte in taken for byte in range(found[-1][1], at))
        if at % b.alignment == 0 and new and not any(byte in taken for byte in range(at, at + b.size)):
            room = min((byte for byte in taken if byte >= at), default=1 << 40) - at
            found.append((room if best else 0, at))
    return min(found)[1]


@pytest.mark.parametrize("best", [False, True])
def test_plain_python_places_in_order_at_the_first_or_tightest_free_offset(best: bool) -> None:
    for seed in range(150):
        problem = small_problem(seed, most=12, pins=True)
        order = sorted(problem.buffers, key=lambda b: (b.size * 7 + seed) % 10)
        found = in_order(problem, order, best=best, compiled=False)
        assert in_order(problem, order, best=best, compiled=True) == found
        placed = [(b.pinned_offset, b) for b in problem.buffers if b.pinned_offset is not None]
        for b in order:
            if b.pinned_offset is None:
                placed.append((_free_offset(b, placed, best=best), b))
        assert {b.id: at for at, b in placed} == found, seed


def test_compiled_code_is_selected_by_the_number_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.solvers import baselines as sequence
    from memplan.solvers import thresholds

    monkeypatch.setattr(sequence, "_compiled", lambda *_, best: {"compiled": best})
    problem = _problem((1, 0, 1), (1, 0, 1))
    for threshold, compiled in ((1, True), (2, False)):
        monkeypatch.setattr(thresholds, "COMPILED", threshold)
        assert ("compiled" in in_order(problem, problem.buffers)) == compiled
    assert in_order(problem, problem.buffers, best=True, compiled=True) == {"compiled": True}


def test_weightless_buffers_lie_at_zero_or_at_their_pin() -> None:
    made = (
        Buffer(id="a", size=4, live=Interval(0, 2)),
        Buffer(id="none", size=0, live=Interval(0, 2)),
        Buffer(id="pin", size=0, live=Interval(0, 2), pinned_offset=64),
        Buffer(id="b", size=4, live=Interval(0, 2)),
    )
    problem = Problem(buffers=made)
    for compiled in (False, True):
        found = in_order(problem, problem.buffers, compiled=compiled)
        assert found == {"a": 0, "none": 0, "pin": 64, "b": 4}


def test_orders_of_the_greedy_solvers() -> None:
    rows = ((2, 3, 6), (5, 0, 4), (5, 1, 9), (2, 2, 9))
    assert _offsets("greedy", _problem(*rows)) == [12, 0, 5, 10]
    assert _offsets("tstack", _problem(*rows)) == [7, 9, 0, 5]
    ties = ((2, 1, 9), (2, 0, 9), (2, 0, 9))
    assert _offsets("tstack", _problem(*ties)) == [4, 0, 2]
    assert _offsets("greedy", _problem(*ties)) == [4, 0, 2]


def test_naive_stacks_everything_above_what_is_pinned() -> None:
    made = (
        Buffer(id="a", size=5, live=Interval(0, 1), alignment=4),
        Buffer(id="pin", size=6, live=Interval(0, 1), pinned_offset=8),
        Buffer(id="low", size=3, live=Interval(5, 6), pinned_offset=0),
        Buffer(id="b", size=5, live=Interval(3, 4), alignment=4),
    )
    assert dict(solve(made, solver="naive").offsets) == {"pin": 8, "low": 0, "a": 16, "b": 24}


def test_a_buffer_goes_into_the_fullest_partition_that_takes_it() -> None:
    problem = _problem((9, 0, 2), (8, 0, 3), (7, 3, 4), (6, 2, 3), (5, 3, 5), (1, 4, 5), (1, 0, 9))
    found = [[b.id for b in members] for members in partitions(problem)]
    assert found == [["0", "2", "3", "5"], ["1", "4"], ["6"]]
    assert _offsets("partition", problem) == [0, 9, 0, 0, 9, 0, 17]
    gaps = Buffer(id="g", size=9, live=Interval(0, 6), gaps=(Interval(2, 4),))
    inside = Buffer(id="i", size=5, live=Interval(2, 4))
    assert len(partitions(Problem(buffers=(gaps, inside)))) == 1
    aligned = solve((Buffer(id="a", size=5, live=Interval(0, 1)),
                     Buffer(id="b", size=3, live=Interval(0, 1), alignment=4)), solver="partition")  # fmt: skip
    assert dict(aligned.offsets) == {"a": 0, "b": 8}


def test_a_buffer_goes_into_the_smallest_free_object_or_above_its_tenants() -> None:
    problem = _problem((10, 0, 2), (8, 0, 2), (7, 2, 4), (2, 2, 5), (3, 4, 6), (2, 4, 5))
    # Two objects of 10 and 8; 7 goes into that of 8, 3 into it later; 2 into that of 10, and the last one above that.
    assert _offsets("shared", problem) == [0, 10, 10, 0, 10, 2]
    more = _problem((10, 0, 2), (4, 0, 2), (6, 2, 3), (4, 2, 4), (4, 2, 3), (1, 2, 3))
    assert _offsets("shared", more) == [0, 10, 0, 10, 6, 14]
    aligned = _problem((10, 0, 2), (3, 2, 4), (3, 2, 4), (3, 2, 4), alignment=4)
    assert _offsets("shared", aligned) == [0, 0, 4, 12]


def test_size_classes_of_tlsf() -> None:
    assert [size_class(size) for size in (1, 31, 32, 33, 63, 64, 65, 66, 127, 128, 131, 132)] == [
        1, 31, 32, 33, 63, 64, 64, 65, 95, 96, 96, 97,
    ]  # fmt: skip
    assert [class_of_request(size) for size in (1, 31, 32, 63, 64, 65, 66, 67, 128, 129, 132, 133)] == [
        1, 31, 32, 63, 64, 65, 65, 66, 96, 97, 97, 98,
    ]  # fmt: skip


def test_a_pool_splits_joins_and_grows() -> None:
    pool = _Pool()
    blocks = [pool.take(size) for size in (10, 20, 30, 40)]
    assert blocks == [(0, 10), (10, 30), (30, 60), (60, 100)]
    pool.give(*blocks[1])
    assert pool.take(21) == (100, 121)  # the free block is too small
    assert pool.take(5) == (10, 15)
    assert pool.take(15) == (15, 30)
    pool.give(0, 10)
    pool.give(30, 60)
    pool.give(10, 15)
    pool.give(15, 30)
    assert (dict(pool.starts), dict(pool.ends), pool.classes) == ({0: 60}, {60: 0}, [size_class(60)])
    pool.give(100, 121)
    assert pool.take(61) == (100, 161)  # the block at the end of the pool grows
    assert (pool.end, pool.take(60), pool.classes) == (161, (0, 60), [])


def test_of_equal_classes_the_block_released_last_is_taken() -> None:
    pool = _Pool()
    blocks = [pool.take(8) for _ in range(7)]
    for k in (1, 5, 3):
        pool.give(*blocks[k])
    assert [pool.take(8)[0] for _ in range(4)] == [24, 40, 8, 56]


def test_tlsf_frees_before_it_allocates_and_respects_alignments() -> None:
    assert _offsets("tlsf", _problem((8, 0, 2), (4, 0, 1), (4, 1, 3), (8, 2, 4))) == [0, 8, 8, 0]
    found = _offsets("tlsf", _problem((5, 0, 2), (5, 0, 2), (5, 1, 3), alignment=8))
    assert [at % 8 for at in found] == [0, 0, 0]
    assert len(set(found)) == 3


def test_hill_climbing_is_never_worse_than_its_start_and_finds_better() -> None:
    better = 0
    for seed in range(20):
        problem = small_problem(seed, most=14)
        start = in_order(problem, sorted(problem.buffers, key=lambda b: (-b.size, -len(b.live))))
        first = max(start[b.id] + b.size for b in problem.buffers)
        solution = HillClimb().solve(problem, seed=seed)
        assert problem.max_live <= solution.arena_size <= first
        assert HillClimb().solve(problem, seed=seed).offsets == solution.offsets
        better += solution.arena_size < first
    assert better >= 2


def test_hill_climbing_stops_at_max_live_and_at_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    real = hill_climb._swapped

    def swapped(*args: Any) -> list[Buffer]:
        tried.append(1)
        return real(*args)

    monkeypatch.setattr(hill_climb, "_swapped", swapped)
    HillClimb().solve(_problem((3, 0, 2), (4, 0, 2)))
    assert not tried
    open_problem = next(
        p for p in (small_problem(seed, most=14) for seed in range(100)) if HillClimb().solve(p).arena_size > p.max_live
    )
    tried.clear()
    HillClimb().solve(open_problem, limits=SolverLimits(seconds=0.0))
    assert not tried
    HillClimb().solve(open_problem, limits=SolverLimits(work=0))
    assert len(tried) == 500


def test_hill_climbing_keeps_the_best_order_and_accepts_worse_ones_less_and_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every order that is tried is made worse than all before it, but for one."""
    heights: list[int] = []
    from_arena: list[int] = []

    def height(problem: Problem, offsets: dict[str, int]) -> int:
        heights.append(500 if len(heights) == 100 else 1_000 + len(heights))
        placed.append(offsets)
        return heights[-1]

    def swapped(problem: Problem, order: list[Buffer], offsets: dict[str, int], arena: int, _: object) -> list[Buffer]:
        from_arena.append(arena)
        return [*order[1:], order[0]]

    placed: list[dict[str, int]] = []
    monkeypatch.setattr(hill_climb, "_arena", height)
    monkeypatch.setattr(hill_climb, "_swapped", swapped)
    solution = HillClimb().solve(_problem((2, 0, 3), (3, 0, 3), (5, 1, 4)), limits=SolverLimits(work=1))
    accepted = [after != before for before, after in itertools.pairwise(from_arena)]
    assert len(from_arena) == 500
    assert solution.offsets == placed[100]
    assert accepted[99]
    assert 50 < sum(accepted[:250]) < 100  # half of the squared share of the turns that are left: 73 and 10
    assert 2 < sum(accepted[250:]) < 25


def test_neighbours_of_the_top_are_exchanged_with_it() -> None:
    """Only the order's place of a topmost buffer changes, with one that meets it, or meets one that does."""
    import random

    problem = _problem((3, 0, 2), (4, 1, 4), (5, 3, 6), (6, 5, 8), (7, 20, 21))
    offsets = {"0": 0, "1": 10, "2": 0, "3": 0, "4": 0}
    chance, partners = random.Random(1), []
    for _ in range(300):
        order = hill_climb._swapped(problem, list(problem.buffers), offsets, 14, chance)
        moved = [i for i, b in enumerate(order) if b.id != str(i)]
        assert 1 in moved or not moved
        partners += [i for i in moved if i != 1]
        assert sorted(b.id for b in order) == ["0", "1", "2", "3", "4"]
    assert set(partners) == {0, 2, 3}
    assert 0.1 < partners.count(3) / 300 < 0.3  # half of the time by a second level, of which a third part
    assert math.isclose(partners.count(0), partners.count(2), rel_tol=0.6)
