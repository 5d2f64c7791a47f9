"""Solvers of one rule each, and lower bounds, against their rules."""

from __future__ import annotations

import pytest
from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import solve, thresholds
from memplan.solvers.arrays import lower_bound, make_problem_arrays
from memplan.solvers.baselines import in_order, partitions
from tests.solvers.small import least_arena, problem_of, small_problem
from tests.strategies import layered_problems


def _offsets(solver: str, problem: Problem) -> list[int]:
    found = solve(problem, solver=solver).offsets
    return [found[b.id] for b in problem.buffers]


def _free_offset(b: Buffer, placed: list[tuple[int, Buffer]]) -> int:
    """The lowest aligned offset at which `b` overlaps nothing placed."""
    met = [(at, at + o.size) for at, o in placed if any(not s.is_disjoint(t) for s in b.segments for t in o.segments)]
    taken = {byte for low, high in met for byte in range(low, high)}
    aligned = range(0, max(taken, default=0) + b.alignment + 1, b.alignment)
    return next(at for at in aligned if not any(byte in taken for byte in range(at, at + b.size)))


def test_plain_python_places_in_order_at_the_first_free_offset() -> None:
    for seed in range(150):
        problem = small_problem(seed, most=12, pins=True)
        order = sorted(problem.buffers, key=lambda b: (b.size * 7 + seed) % 10)
        found = in_order(problem, order, arrays=False)
        assert in_order(problem, order, arrays=True) == found
        placed = [(b.pinned_offset, b) for b in problem.buffers if b.pinned_offset is not None]
        for b in order:
            if b.pinned_offset is None:
                placed.append((_free_offset(b, placed), b))
        assert {b.id: at for at, b in placed} == found, seed


def test_numpy_is_selected_by_the_number_of_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    from memplan.solvers import baselines as sequence

    monkeypatch.setattr(sequence, "_by_arrays", lambda *_: {"arrays": 0})
    problem = problem_of((1, 0, 1), (1, 0, 1))
    for threshold, arrays in ((1, True), (2, False)):
        monkeypatch.setattr(thresholds, "SMALL", threshold)
        assert ("arrays" in in_order(problem, problem.buffers)) == arrays


def test_weightless_buffers_lie_at_zero_or_at_their_pin() -> None:
    made = (
        Buffer(id="a", size=4, live=Interval(0, 2)),
        Buffer(id="none", size=0, live=Interval(0, 2)),
        Buffer(id="pin", size=0, live=Interval(0, 2), pinned_offset=64),
        Buffer(id="b", size=4, live=Interval(0, 2)),
    )
    problem = Problem(buffers=made)
    for arrays in (False, True):
        found = in_order(problem, problem.buffers, arrays=arrays)
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


def _bound(*rows: tuple[int, int, int], alignment: int = 64, pin: int | None = None) -> int:
    """The bound of buffers (size, start, end); the last one is pinned."""
    made = [
        Buffer(id=str(i), size=size, live=Interval(start, end), alignment=alignment,
               pinned_offset=pin if i == len(rows) - 1 else None)
        for i, (size, start, end) in enumerate(rows)
    ]  # fmt: skip
    return lower_bound(make_problem_arrays(Problem(buffers=tuple(made))))


def test_padding_counts_but_for_the_topmost_buffer_of_each_section() -> None:
    assert _bound((33, 0, 2), (33, 0, 2), (33, 0, 2)) == 64 + 64 + 33
    assert _bound((33, 0, 2), (60, 0, 2)) == 64 + 33  # the one with the most padding on top
    # 256 bytes without padding in one section, 200 with much of it in another: the first counts whole.
    assert _bound((256, 0, 2), (200, 3, 5)) == 256
    assert _bound((128, 0, 2), (128, 0, 2), (130, 3, 5)) == 256
    assert _bound((33, 0, 5), (33, 0, 5), (64, 2, 3)) == 64 + 64 + 33
    assert _bound((7, 0, 2), (9, 1, 3), alignment=1) == 16


def test_no_arena_ends_below_a_pinned_or_a_large_buffer() -> None:
    assert _bound((8, 0, 1), (8, 5, 6), pin=640) == 648
    assert _bound((65, 0, 1), alignment=64) == 65


@given(problem=layered_problems(most=6))
def test_it_is_never_above_the_least_arena(problem: Problem) -> None:
    exact = least_arena(problem)
    bound = lower_bound(make_problem_arrays(problem))
    assert bound <= exact
    if all(b.alignment == 1 for b in problem.buffers):
        assert bound >= problem.max_live
