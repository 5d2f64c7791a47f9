"""Each mutation of a valid plan is refused with the right reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.core.problem import Buffer, Infeasibility, Interval, Problem, Solution, Status
from memplan.core.validate import Violation, validate
from memplan.errors import InvalidSolution
from tests.strategies import problems


def _problem() -> Problem:
    return Problem(
        buffers=(
            Buffer(id="a", size=64, live=Interval(0, 4), alignment=64),
            Buffer(id="b", size=32, live=Interval(2, 6), alignment=32),
            Buffer(id="pin", size=16, live=Interval(0, 6), pinned_offset=96),
        ),
        capacity=200,
    )


def _valid() -> Solution:
    return Solution(
        offsets={"a": 0, "b": 64, "pin": 96}, arena_size=112, status=Status.OPTIMAL, bound=112, solver="hand"
    )  # fmt: skip


def _moved(**offsets: int) -> Callable[[Solution], Solution]:
    return lambda s: dataclasses.replace(s, offsets={**s.offsets, **offsets})


def _changed(**fields: object) -> Callable[[Solution], Solution]:
    return lambda s: dataclasses.replace(s, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mutate", "violation"),
    [
        (lambda s: dataclasses.replace(s, offsets={"a": 0, "b": 64}), Violation.MISSING),
        (_moved(stranger=0), Violation.UNKNOWN_BUFFER),
        (_moved(b=96), Violation.OUT_OF_ARENA),
        (_moved(b=-32), Violation.OUT_OF_ARENA),
        (_moved(b=72), Violation.MISALIGNED),
        (_moved(pin=64), Violation.PINNED_MOVED),
        (_moved(b=32), Violation.OVERLAP),
        (_changed(arena_size=128), Violation.WRONG_ARENA),
        (_changed(bound=113), Violation.WRONG_BOUND),
        (_changed(bound=100), Violation.WRONG_STATUS),
        (_changed(status=Status.INFEASIBLE), Violation.WRONG_STATUS),
    ],
)
def test_each_mutation_is_named(mutate: Callable[[Solution], Solution], violation: Violation) -> None:
    validate(_problem(), _valid())
    with pytest.raises(InvalidSolution) as caught:
        validate(_problem(), mutate(_valid()))
    assert caught.value.violation == violation.value


def _one_after_another(*rows: tuple[int, int, int, int]) -> tuple[Problem, dict[str, int]]:
    """A problem of (size, start, end, offset) and its offsets."""
    made = tuple(
        Buffer(id=f"b{i}", size=size, live=Interval(start, end)) for i, (size, start, end, _) in enumerate(rows)
    )
    return Problem(buffers=made), {f"b{i}": row[3] for i, row in enumerate(rows)}


def _said(problem: Problem, offsets: dict[str, int], **changes: object) -> Solution:
    arena = max((offsets[b.id] + b.size for b in problem.buffers if b.id in offsets), default=0)
    said = Solution(offsets=offsets, arena_size=arena, status=Status.FEASIBLE, bound=0, solver="hand")
    return dataclasses.replace(said, **changes)  # type: ignore[arg-type]


def _violation(problem: Problem, solution: Solution) -> tuple[str, str | None, str]:
    with pytest.raises(InvalidSolution) as caught:
        validate(problem, solution)
    error = caught.value
    return error.violation, error.where, error.what.removeprefix(f"{error.violation}: ")


@pytest.mark.parametrize(
    ("other", "step"),
    [
        ((8, 2, 9, 1), 2),  # from below, by one byte
        ((8, 2, 9, 15), 2),  # from above, by one byte
        ((20, 2, 9, 2), 2),  # around it
        ((1, 2, 9, 12), 2),  # inside it
        ((8, 2, 9, 8), 2),  # the same bytes
        ((8, 0, 2, 1), 1),  # only in the last step of the other's life
        ((1, 4, 5, 15), 4),  # only in its own last step
    ],
)
def test_one_byte_or_one_step_too_many_is_found(other: tuple[int, int, int, int], step: int) -> None:
    problem, offsets = _one_after_another((8, 1, 5, 8), other, (5, 0, 9, 40))
    violation, where, what = _violation(problem, _said(problem, offsets))
    assert violation == "overlap"
    assert where in ("buffer 'b0'", "buffer 'b1'")
    assert what.endswith(f"are both alive at step {step}")


@pytest.mark.parametrize("other", [(8, 2, 9, 0), (8, 2, 9, 16), (8, 5, 9, 8), (8, 0, 1, 8), (0, 2, 3, 12)])
def test_what_only_touches_is_valid(other: tuple[int, int, int, int]) -> None:
    problem, offsets = _one_after_another((8, 1, 5, 8), other, (5, 0, 9, 40))
    validate(problem, _said(problem, offsets))


@given(problem=problems(most=7, aligned=False), data=st.data())
@settings(max_examples=150, deadline=None)
def test_overlaps_are_what_comparing_every_pair_finds(problem: Problem, data: st.DataObject) -> None:
    offsets = {b.id: data.draw(st.integers(0, 60)) for b in problem.buffers}
    overlap = any(
        one.size and two.size
        and offsets[one.id] < offsets[two.id] + two.size and offsets[two.id] < offsets[one.id] + one.size
        and any(a.start < b.end and b.start < a.end for a in one.segments for b in two.segments)
        for place, one in enumerate(problem.buffers) for two in problem.buffers[:place]
    )  # fmt: skip
    if overlap:
        assert _violation(problem, _said(problem, offsets))[0] == "overlap"
    else:
        validate(problem, _said(problem, offsets))


def test_a_buffer_pinned_to_0_must_lie_there() -> None:
    problem = Problem(buffers=(Buffer(id="first", size=4, live=Interval(0, 1), pinned_offset=0),))
    validate(problem, _said(problem, {"first": 0}))
    assert _violation(problem, _said(problem, {"first": 4})) == (
        "pinned moved", "buffer 'first'", "is at 4, pinned to 0",
    )  # fmt: skip


def test_a_buffer_may_end_with_the_arena_and_no_later() -> None:
    problem, offsets = _one_after_another((8, 0, 2, 0), (8, 0, 2, 8))
    validate(problem, _said(problem, offsets, arena_size=16))
    assert _violation(problem, _said(problem, offsets, arena_size=15)) == (
        "out of the arena", "buffer 'b1'", "[8, 16) is not inside the arena of 15 bytes",
    )  # fmt: skip
    assert _violation(problem, _said(problem, offsets, arena_size=17))[0] == "wrong arena size"
    assert _violation(problem, _said(problem, {"b0": -1, "b1": 8}))[:2] == ("out of the arena", "buffer 'b0'")
    validate(Problem(buffers=()), Solution(offsets={}, arena_size=0, status=Status.OPTIMAL, bound=0, solver="hand"))


@pytest.mark.parametrize("status", [Status.FEASIBLE, Status.OPTIMAL])
def test_the_capacity_is_kept_by_whoever_says_so(status: Status) -> None:
    problem, offsets = _one_after_another((8, 0, 2, 0), (8, 0, 2, 8))
    exact, tight = (Problem(buffers=problem.buffers, capacity=capacity) for capacity in (16, 15))
    validate(exact, _said(problem, offsets, status=status, bound=16))
    assert _violation(tight, _said(problem, offsets, status=status, bound=16))[::2] == (
        "over capacity", "arena 16 exceeds 15 bytes",
    )  # fmt: skip
    validate(tight, _said(problem, offsets, status=Status.UNKNOWN, bound=15))


def test_unknown_claims_nothing_and_what_it_carries_is_checked() -> None:
    problem, offsets = _one_after_another((8, 0, 2, 0), (8, 0, 2, 7))
    validate(problem, _said(problem, {}, status=Status.UNKNOWN))
    assert _violation(problem, _said(problem, offsets, status=Status.UNKNOWN))[0] == "overlap"
    assert _violation(problem, _said(problem, {}))[:2] == ("missing", "buffer 'b0'")
    assert _violation(problem, _said(problem, {**offsets, "b1": 8, "b2": 0}))[:2] == ("unknown buffer", "buffer 'b2'")


def _claim(*, capacity: int | None, bound: int, proof: Infeasibility | None) -> tuple[Problem, Solution]:
    gapped = Buffer(id="gapped", size=8, live=Interval(0, 9), gaps=(Interval(2, 4),))
    problem = Problem(buffers=(*_problem().buffers, gapped), capacity=capacity)
    said = Solution(offsets={}, arena_size=0, status=Status.INFEASIBLE, bound=bound, solver="hand", proof=proof)
    return problem, said


def test_infeasible_needs_a_bound_above_the_capacity() -> None:
    validate(*_claim(capacity=100, bound=101, proof=None))
    for capacity in (101, None):
        violation, where, what = _violation(*_claim(capacity=capacity, bound=101, proof=None))
        assert (violation, where) == ("wrong status", None)
        assert what == "infeasible, but the bound 101 is within the capacity"


@pytest.mark.parametrize(
    ("capacity", "step", "ids", "needed", "violation"),
    [
        (111, 2, ("a", "b", "pin"), 112, None),
        (111, 3, ("a", "b", "pin"), 112, None),  # the last step of a
        (112, 3, ("a", "b", "pin"), 112, "wrong status"),  # equal to the capacity: fits
        (100, 3, ("a", "b", "pin"), 113, "wrong status"),  # says more than it adds up to
        (100, 3, ("a", "b", "pin"), 111, "wrong status"),  # says less
        (85, 3, ("a", "pin", "pin"), 96, "wrong status"),  # counts one twice
        (100, 4, ("a", "b", "pin"), 112, "wrong status"),  # a is dead by then
        (100, 1, ("a", "b", "pin"), 112, "wrong status"),  # b is not born
        (100, 3, ("a", "b", "pin", "gapped"), 120, "wrong status"),  # in its gap
        (119, 4, ("b", "pin", "gapped"), 56, "wrong status"),
        (50, 4, ("b", "pin", "gapped"), 56, None),  # back from its gap
        (100, 3, ("a", "b", "ghost"), 112, "unknown buffer"),
    ],
)
def test_a_proof_adds_up_at_its_step(
    capacity: int, step: int, ids: tuple[str, ...], needed: int, violation: str | None
) -> None:
    claim = _claim(capacity=capacity, bound=200, proof=Infeasibility(step=step, ids=ids, needed=needed))
    if violation is None:
        validate(*claim)
    else:
        assert _violation(*claim)[0] == violation


def test_a_proof_of_many_bytes_is_believed() -> None:
    buffers = tuple(Buffer(id=name, size=300_000, live=Interval(0, 2)) for name in "ab")
    proof = Infeasibility(step=1, ids=("a", "b"), needed=600_000)
    claim = Solution(offsets={}, arena_size=0, status=Status.INFEASIBLE, bound=600_000, solver="hand", proof=proof)
    validate(Problem(buffers=buffers, capacity=500_000), claim)
