"""Solvers of one rule each, against their rules."""

from __future__ import annotations

import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import solve
from memplan.solvers.baselines import in_order, partitions
from tests.solvers.small import problem_of, small_problem


def _offsets(solver: str, problem: Problem) -> list[int]:
    found = solve(problem, solver=solver).offsets
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
    assert _offsets("greedy", problem_of(*rows)) == [12, 0, 5, 10]
    assert _offsets("tstack", problem_of(*rows)) == [7, 9, 0, 5]
    ties = ((2, 1, 9), (2, 0, 9), (2, 0, 9))
    assert _offsets("tstack", problem_of(*ties)) == [4, 0, 2]
    assert _offsets("greedy", problem_of(*ties)) == [4, 0, 2]


def test_naive_stacks_everything_above_what_is_pinned() -> None:
    made = (
        Buffer(id="a", size=5, live=Interval(0, 1), alignment=4),
        Buffer(id="pin", size=6, live=Interval(0, 1), pinned_offset=8),
        Buffer(id="low", size=3, live=Interval(5, 6), pinned_offset=0),
        Buffer(id="b", size=5, live=Interval(3, 4), alignment=4),
    )
    assert dict(solve(made, solver="naive").offsets) == {"pin": 8, "low": 0, "a": 16, "b": 24}


def test_a_buffer_goes_into_the_fullest_partition_that_takes_it() -> None:
    problem = problem_of((9, 0, 2), (8, 0, 3), (7, 3, 4), (6, 2, 3), (5, 3, 5), (1, 4, 5), (1, 0, 9))
    found = [[b.id for b in members] for members in partitions(problem)]
    assert found == [["0", "2", "3", "5"], ["1", "4"], ["6"]]
    assert _offsets("partition", problem) == [0, 9, 0, 0, 9, 0, 17]
    gaps = Buffer(id="g", size=9, live=Interval(0, 6), gaps=(Interval(2, 4),))
    inside = Buffer(id="i", size=5, live=Interval(2, 4))
    assert len(partitions(Problem(buffers=(gaps, inside)))) == 1
    aligned = solve((Buffer(id="a", size=5, live=Interval(0, 1)),
                     Buffer(id="b", size=3, live=Interval(0, 1), alignment=4)), solver="partition")  # fmt: skip
    assert dict(aligned.offsets) == {"a": 0, "b": 8}
