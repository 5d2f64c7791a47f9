"""Buffers, problems and their figures."""

from __future__ import annotations

import pytest
from hypothesis import given

from memplan.core.problem import Buffer, Interval, Problem
from memplan.errors import InvalidProblem
from tests.strategies import problems


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": -1}, "negative size"),
        ({"alignment": 0}, "not positive"),
        ({"live": Interval(3, 3)}, "empty"),
        ({"pinned_offset": -8}, "negative or not a multiple"),
        ({"alignment": 64, "pinned_offset": 32}, "not a multiple of 64"),
        ({"gaps": (Interval(0, 2),)}, "not strictly inside"),
        ({"gaps": (Interval(2, 4), Interval(4, 5))}, "not apart"),
    ],
)
def test_impossible_buffers_are_refused_by_name(kwargs: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {"id": "b", "size": 1, "live": Interval(0, 9), **kwargs}
    with pytest.raises(InvalidProblem, match=message) as caught:
        Buffer(**fields)  # type: ignore[arg-type]
    assert caught.value.where == "buffer 'b'"


def test_ids_are_unique_and_capacities_not_negative() -> None:
    twin = Buffer(id="twin", size=1, live=Interval(0, 1))
    with pytest.raises(InvalidProblem, match="not unique"):
        Problem(buffers=(twin, twin))
    with pytest.raises(InvalidProblem, match="negative capacity"):
        Problem(buffers=(twin,), capacity=-1)


def test_segments_leave_the_gaps_out() -> None:
    b = Buffer(id="b", size=1, live=Interval(0, 9), gaps=(Interval(2, 3), Interval(5, 7)))
    assert b.segments == (Interval(0, 2), Interval(3, 5), Interval(7, 9))


@given(problem=problems())
def test_max_live_is_the_largest_sum_over_steps(problem: Problem) -> None:
    last = max((b.live.end for b in problem.buffers), default=0)
    sums = [sum(b.size for b in problem.alive_at(step)) for step in range(last)]
    assert problem.max_live == max(sums, default=0)
    assert not sums or sums[problem.peak_step] == problem.max_live


@given(problem=problems(most=6))
def test_fingerprints_follow_what_decides_a_plan(problem: Problem) -> None:
    renamed = Problem(
        buffers=tuple(
            Buffer(id=f"x{i}", size=b.size, live=b.live, alignment=b.alignment, gaps=b.gaps, kind="k", origin="o")
            for i, b in enumerate(problem.buffers)
        )
    )
    assert renamed.fingerprint == problem.fingerprint
    assert Problem(buffers=problem.buffers, capacity=7).fingerprint != problem.fingerprint
