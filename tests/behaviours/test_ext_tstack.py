"""The ext-tstack design note: a released tensor leaves one contiguous hole (rows E2 and E3 of its behaviours)."""

from __future__ import annotations

from memplan.problem import Buffer, Interval, Problem
from memplan.solve import solve

_CAPACITY, _END = 80, 10


def _note(*, released: tuple[str, ...] = ("B",)) -> Problem:
    """The note's example from step S = 0: A -> B, (A, B) -> C, load D. `released` die before D is loaded."""
    lives = {"A": Interval(0, _END), "B": Interval(1, _END), "C": Interval(2, _END), "D": Interval(4, _END)}
    for name in released:
        lives[name] = Interval(lives[name].start, 3)
    sizes = {"A": 16, "B": 16, "C": 30, "D": 30}
    return Problem(
        buffers=tuple(Buffer(id=name, size=sizes[name], live=lives[name]) for name in sizes), capacity=_CAPACITY
    )


def test_E2_a_tensor_to_be_released_lies_after_the_result_computed_from_it() -> None:  # noqa: N802
    problem = _note()
    solution = solve(problem, solver="tstack")
    assert dict(solution.offsets) == {"A": 0, "C": 16, "B": 46, "D": 46}
    assert solution.arena_size == problem.max_live == 76


def test_E2_releasing_only_B_leaves_room_for_D() -> None:  # noqa: N802
    offsets = solve(_note(), solver="tstack").offsets
    hole = offsets["B"], _CAPACITY
    assert hole[1] - hole[0] >= 30
    assert offsets["D"] == hole[0]


def test_E2_the_default_layout_reaches_the_same_arena() -> None:  # noqa: N802
    assert solve(_note(), minimize=True).arena_size == 76


def test_E3_placing_in_order_of_time_needs_C_released_too() -> None:  # noqa: N802
    # What DTR does: allocate first-fit as results come, so B's release leaves holes of 16 and 18 bytes.
    in_time = solve(Problem(buffers=_note().buffers), solver="online-first")
    assert (in_time.offsets["B"], in_time.offsets["C"]) == (16, 32)
    assert in_time.arena_size == 92 > _CAPACITY
    both = solve(Problem(buffers=_note(released=("B", "C")).buffers), solver="online-first")
    assert both.arena_size <= _CAPACITY
