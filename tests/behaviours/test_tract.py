"""tract's memory schema: lifetimes and greedy partitioning (rows C1, C3, C5 and C6 of its behaviours)."""

from __future__ import annotations

from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import solve
from memplan.solvers.baselines import partitions
from tests.strategies import problems


def test_C1_lifetimes_are_half_open() -> None:  # noqa: N802
    life = Interval(2, 5)
    assert len(life) == 3
    assert not life.is_empty
    assert Interval(4, 4).is_empty
    assert [life.is_alive_at_step(step) for step in (1, 2, 4, 5)] == [False, True, True, False]
    assert life.is_disjoint(Interval(5, 7))
    assert Interval(0, 2).is_disjoint(life)
    assert not life.is_disjoint(Interval(4, 6))


def test_C3_each_buffer_joins_the_compatible_partition_with_the_largest_total() -> None:  # noqa: N802
    made = tuple(
        Buffer(id=name, size=size, live=Interval(start, end))
        for name, size, start, end in (("a", 9, 0, 2), ("b", 8, 0, 2), ("c", 5, 2, 4), ("d", 4, 2, 4), ("e", 1, 4, 6))
    )
    problem = Problem(buffers=made)
    assert [[b.id for b in group] for group in partitions(problem)] == [["a", "c", "e"], ["b", "d"]]
    assert solve(problem, solver="partition").arena_size == 17


@given(problem=problems(aligned=False))
def test_C3_the_arena_is_the_sum_of_the_partitions_maxima(problem: Problem) -> None:  # noqa: N802
    groups = partitions(problem)
    for group in groups:
        for i, one in enumerate(group):
            assert all(a.is_disjoint(b) for two in group[:i] for a in one.segments for b in two.segments)
    expected = sum(max(b.size for b in group) for group in groups)
    assert solve(problem, solver="partition").arena_size == expected


def test_C5_usage_and_peak_follow_alignment() -> None:  # noqa: N802
    made = [Buffer(id=str(i), size=100, live=Interval(0, 1), alignment=64) for i in range(2)]
    solution = solve(made)
    assert solution.offsets == {"0": 0, "1": 128}
    assert (solution.arena_size, solution.bound) == (228, 228)
