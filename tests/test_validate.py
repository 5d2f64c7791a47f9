"""Each mutation of a valid plan is refused with the right reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from memplan.errors import InvalidSolution
from memplan.problem import Buffer, Infeasibility, Interval, Problem, Solution, Status
from memplan.solve import solve
from memplan.validate import Violation, validate
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


def test_a_plan_above_the_capacity_is_refused_unless_it_says_so() -> None:
    problem = Problem(buffers=_problem().buffers, capacity=111)
    with pytest.raises(InvalidSolution, match="over capacity"):
        validate(problem, _valid())
    validate(problem, dataclasses.replace(_valid(), status=Status.UNKNOWN, bound=100))


@pytest.mark.parametrize(
    "proof",
    [
        Infeasibility(step=1, ids=("a", "b", "pin"), needed=112),  # b is not alive at step 1
        Infeasibility(step=3, ids=("a", "b"), needed=112),  # does not add up
        Infeasibility(step=3, ids=("a", "ghost"), needed=112),
    ],
)
def test_proofs_of_infeasibility_are_checked(proof: Infeasibility) -> None:
    problem = Problem(buffers=_problem().buffers, capacity=100)
    good = Infeasibility(step=3, ids=("a", "b", "pin"), needed=112)
    claim = Solution(offsets={}, arena_size=0, status=Status.INFEASIBLE, bound=112, solver="hand", proof=good)
    validate(problem, claim)
    with pytest.raises(InvalidSolution):
        validate(problem, dataclasses.replace(claim, proof=proof))


@given(problem=problems(most=10), data=st.data())
@settings(max_examples=150, deadline=None)
def test_two_buffers_on_the_same_bytes_are_always_found(problem: Problem, data: st.DataObject) -> None:
    pairs = [
        (one, two)
        for one in problem.buffers
        for two in problem.buffers
        if one.id != two.id and one.size and two.size and two.alignment == 1
        and any(not a.is_disjoint(b) for a in one.segments for b in two.segments)
    ]  # fmt: skip
    assume(pairs)
    one, two = data.draw(st.sampled_from(pairs))
    solution = solve(problem, solver="greedy")
    offsets = {**solution.offsets, two.id: solution.offsets[one.id]}
    arena = max(offsets[b.id] + b.size for b in problem.buffers)
    clash = Solution(offsets=offsets, arena_size=arena, status=Status.FEASIBLE, bound=0, solver="hand")
    with pytest.raises(InvalidSolution, match="overlap"):
        validate(problem, clash)
