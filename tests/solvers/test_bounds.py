"""Lower bounds: as high as they can be on problems whose least arena is known, and never above it."""

from __future__ import annotations

from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers.arrays import lower_bound, make_problem_arrays
from tests.solvers.small import least_arena
from tests.strategies import layered_problems


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
