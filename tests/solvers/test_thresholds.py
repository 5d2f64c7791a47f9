"""Every threshold lowered, so that small problems go down the paths that are meant for large ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.problem import Buffer, Interval, Problem, Status
from memplan.core.validate import validate
from memplan.solvers import baselines as sequence
from memplan.solvers import fit_kernel, heuristics, solve, solve_at_capacity, thresholds
from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, make_problem_arrays, subset
from memplan.solvers.base import SolverLimits, WorkBudget, finish
from memplan.solvers.solve_at_capacity import reduce
from tests.solvers.small import decide
from tests.strategies import knotted, layered_problems

# Values under which a dozen buffers are many.
LOWERED = {
    "SMALL": 0, "COMPILED": 0, "MANY": 0,
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


@given(problem=layered_problems(most=8), lowered=_any_of_them, base=st.integers(1, 99), unpinned=st.booleans())
def test_every_heuristic_stays_above_what_lies_below(
    problem: Problem, lowered: frozenset[str], base: int, unpinned: bool
) -> None:
    """A piece is placed at `base` or above, with its alignments, gaps and pins."""
    whole = make_problem_arrays(problem)
    ids = np.flatnonzero(~whole.pinned) if unpinned or whole.pinned.any() else np.arange(whole.n)
    if not len(ids):
        return
    arrays = subset(whole, ids, base)
    with pytest.MonkeyPatch.context() as patch:
        _lower(patch, *lowered)
        for offsets in heuristics.first_answers(arrays):
            assert (offsets >= base).all()
            _check(problem, whole.source[ids], offsets, arrays.unit)


def test_room_below_a_piece_does_not_count_when_it_is_peeled() -> None:
    whole = make_problem_arrays(Problem(buffers=tuple(Buffer(id=name, size=4, live=Interval(0, 2)) for name in "ab")))
    assert whole.unit == 4
    assert len(reduce(whole, whole.max_offset(40)).fill) == 2  # ten places for each, whatever the other takes
    raised = subset(whole, np.arange(2), base=8)
    assert not len(reduce(raised, raised.max_offset(36)).fill)  # one place, above 32 bytes that are not theirs
    assert len(reduce(raised, raised.max_offset(40)).fill) == 2


def _calls(patch: pytest.MonkeyPatch, module: Any, name: str, counts: Callable[..., bool]) -> list[str]:
    """Wrap a function so that calls whose arguments count are noted."""
    real, noted = getattr(module, name), []

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if counts(*args):
            noted.append(name)
        return real(*args, **kwargs)

    patch.setattr(module, name, wrapped)
    return noted


def _is_raised(arrays: ProblemArrays, *_: object) -> bool:
    return bool((arrays.low > 0)[~arrays.pinned].any())


def _always(*_: object) -> bool:
    return True


@pytest.mark.parametrize(
    ("lowered", "module", "name", "counts"),
    [
        (("MANY",), heuristics, "online", _is_raised),
        ((), fit_kernel, "fit", lambda *args: bool((args[4] > 0).any())),
        (("COMPILED",), sequence, "_compiled", _always),
    ],
)
def test_small_problems_go_down_every_path(
    monkeypatch: pytest.MonkeyPatch, lowered: tuple[str, ...], module: Any, name: str, counts: Callable[..., bool]
) -> None:
    """With a base above 0 where the path has one; each solution is validated."""
    _lower(monkeypatch, *lowered)
    noted = _calls(monkeypatch, module, name, counts)
    for seed in range(20):
        whole = Buffer(id="whole", size=7, live=Interval(0, 5))  # goes to the bottom
        solve((*knotted(seed), whole), work_limit=5_000, solver="greedy" if name == "_compiled" else "auto")
        if noted:
            return
    pytest.fail(f"{name} was never called")


def test_a_piece_of_a_piece_lies_as_high_as_the_piece() -> None:
    made = [Buffer(id="whole", size=4, live=Interval(0, 9)), Buffer(id="part", size=2, live=Interval(3, 5))]
    arrays = subset(make_problem_arrays(Problem(buffers=tuple(made))), np.arange(2), base=7)
    outcome, offsets = solve_at_capacity.attempt(arrays, arrays.max_offset(20), WorkBudget(SolverLimits(work=1_000)), 0)
    assert outcome is PieceOutcome.SOLVED
    assert offsets.min() == 7
    assert (
        solve_at_capacity.attempt(arrays, arrays.max_offset(18), WorkBudget(SolverLimits(work=1_000)), 0)[0]
        is not PieceOutcome.SOLVED
    )


def _check(problem: Problem, places: Ints, offsets: Ints, unit: int) -> None:
    """`offsets` (units) are a valid placement of the buffers at these places of `problem`."""
    kept = [problem.buffers[i] for i in places.tolist()]
    placed = {b.id: at * unit for b, at in zip(kept, offsets.tolist(), strict=True)}
    validate(Problem(buffers=tuple(kept)), finish(Problem(buffers=tuple(kept)), placed, solver="test", seconds=0.0))
