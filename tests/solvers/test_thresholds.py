"""Every threshold lowered, so that small problems go down the paths that are meant for large ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.problem import Problem, Status
from memplan.core.validate import validate
from memplan.solvers import solve, solve_at_capacity, thresholds
from memplan.solvers.arrays import Ints, PieceOutcome, make_problem_arrays
from memplan.solvers.base import SolverLimits, WorkBudget, finish
from tests.solvers.small import decide
from tests.strategies import layered_problems

# Values under which a dozen buffers are many.
LOWERED = {
    "SMALL": 0, "MANY": 0,
    "QUICK": 0, "LARGE": 2, "ROUND": 0,
    "EFFORT": 10, "LEAST_NODES": 1, "TABLE": 2, "ROOM": 0,
    "ROUNDS": 0,
}  # fmt: skip
_any_of_them = st.frozensets(st.sampled_from(sorted(LOWERED)))


def _lower(patch: pytest.MonkeyPatch, *names: str) -> None:
    for name in names:
        patch.setattr(thresholds, name, LOWERED[name])


def test_every_threshold_is_lowered_here() -> None:
    assert set(LOWERED) == {name for name in vars(thresholds) if name.isupper()}
    assert all(low < getattr(thresholds, name) for name, low in LOWERED.items())


@given(problem=layered_problems(most=9), lowered=_any_of_them, data=st.data())
def test_an_attempt_is_valid_or_right_that_there_is_none(
    problem: Problem, lowered: frozenset[str], data: st.DataObject
) -> None:
    arrays = make_problem_arrays(problem)
    if not arrays.n:
        return
    capacity = data.draw(st.integers(problem.max_live, solve(problem, solver="greedy").arena_size), label="capacity")
    limit = arrays.max_offset(capacity)
    with pytest.MonkeyPatch.context() as patch:
        _lower(patch, *lowered)
        outcome, offsets = solve_at_capacity.attempt(
            arrays, limit, WorkBudget(SolverLimits(work=20_000)), data.draw(st.integers(0, 3))
        )
    if outcome is PieceOutcome.SOLVED:
        assert (offsets <= limit).all()
        _check(problem, arrays.source, offsets, arrays.unit)
    elif outcome is PieceOutcome.EXHAUSTED and (limit >= arrays.low).all():
        assert decide(arrays, limit) is PieceOutcome.EXHAUSTED


@given(problem=layered_problems(), lowered=_any_of_them, share=st.none() | st.floats(0.9, 1.3))
def test_solutions_and_their_proofs_hold_under_lowered_thresholds(
    problem: Problem, lowered: frozenset[str], share: float | None
) -> None:
    greedy = solve(problem, solver="greedy")
    capacity = None if share is None else int(problem.max_live * share)
    with pytest.MonkeyPatch.context() as patch:
        _lower(patch, *lowered)
        solution = solve(problem, capacity=capacity, work_limit=2_000)
    assert solution.bound <= greedy.arena_size
    if capacity is not None:
        fits = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
        assert fits == (solution.arena_size <= capacity)
        assert not (solution.status is Status.INFEASIBLE and greedy.arena_size <= capacity)


def _check(problem: Problem, places: Ints, offsets: Ints, unit: int) -> None:
    """`offsets` (units) are a valid placement of the buffers at these places of `problem`."""
    kept = [problem.buffers[i] for i in places.tolist()]
    placed = {b.id: at * unit for b, at in zip(kept, offsets.tolist(), strict=True)}
    validate(Problem(buffers=tuple(kept)), finish(Problem(buffers=tuple(kept)), placed, solver="test", seconds=0.0))
