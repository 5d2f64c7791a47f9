from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.check import EXPLAINED, Limits, check
from memplan.errors import InvalidSize
from memplan.plan import Plan
from memplan.problem import Buffer, Interval, Problem, Solution, Status
from tests.graph_strategies import plans
from tests.samples import sample_plan


def test_limits_that_are_met_exactly_are_kept() -> None:
    plan = sample_plan()
    outside = plan.total - plan.arena_size
    verdict = check(plan, Limits(max_arena=plan.arena_size, max_fragmentation=0.0, max_outside=outside))
    assert verdict.ok
    assert [f.name for f in verdict.findings] == ["arena", "fragmentation", "outside"]
    assert all(f.excess == 0 and not f.because and not f.parts for f in verdict.findings)


def test_an_arena_one_byte_too_large_is_named_with_its_buffers() -> None:
    plan = sample_plan()
    (finding,) = check(plan, Limits(max_arena=plan.arena_size - 1)).findings
    assert not finding.ok
    assert finding.excess == 1
    assert [holder.module for holder in finding.because] == ["h.0.attn", "", "layers[1].norm"]
    assert finding.because[0].source == "model.py:12"


def test_what_is_outside_is_explained_by_kind() -> None:
    plan = sample_plan()
    (finding,) = check(plan, Limits(max_outside=0)).findings
    assert finding.measured == finding.excess == 248
    assert finding.parts[0] == ("parameters", 100)


def _fragmented(max_live: int, arena: int) -> Plan:
    """A plan whose layout wastes arena - max_live bytes (only its figures matter here)."""
    base = sample_plan()
    problem = Problem(buffers=(Buffer(id="activation_2", size=max_live, live=Interval(0, 1)),))
    solution = Solution(
        offsets={"activation_2": arena - max_live},
        arena_size=arena,
        status=Status.FEASIBLE,
        bound=max_live,
        solver="test",
    )
    return Plan(
        model="m",
        graph=base.graph,
        schedule=base.schedule,
        problem=problem,
        solution=solution,
        alignment=1,
        versions={},
    )


def test_a_share_is_compared_as_it_was_written() -> None:
    assert check(_fragmented(98, 100), Limits(max_fragmentation=0.02)).ok  # 1 - 98 / 100 > 0.02 in floats
    assert check(_fragmented(99, 100), Limits(max_fragmentation=0.01)).ok
    assert not check(_fragmented(97, 100), Limits(max_fragmentation=0.02)).ok


@given(st.integers(1, 2**45), st.integers(0, 2**20), st.floats(0, 1))
def test_an_exceeded_share_never_reads_like_its_limit(max_live: int, waste: int, limit: float) -> None:
    (finding,) = check(_fragmented(max_live, max_live + waste), Limits(max_fragmentation=limit)).findings
    measured, allowed, excess = finding.texts()
    assert finding.ok == (not excess)
    if not finding.ok and finding.measured != finding.limit:
        assert measured != allowed


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_an_exceeded_size_never_reads_like_its_limit(arena: int, limit: int) -> None:
    (finding,) = check(_fragmented(arena, arena), Limits(max_arena=limit)).findings
    measured, allowed, _ = finding.texts()
    assert finding.ok == (arena <= limit)
    assert (measured == allowed) == (arena == limit)


@given(plans(), st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2000))
@settings(deadline=None)
def test_a_verdict_is_ok_exactly_when_every_limit_is_kept(plan: Plan, arena: int, share: float, outside: int) -> None:
    verdict = check(plan, Limits(max_arena=arena, max_fragmentation=share, max_outside=outside))
    kept = (
        plan.arena_size <= arena,
        plan.fragmentation <= share,
        plan.total - plan.arena_size <= outside,
    )
    assert tuple(f.ok for f in verdict.findings) == kept
    assert verdict.ok == all(kept)
    for finding in verdict.findings:
        assert len(finding.because) <= EXPLAINED
        assert len(finding.texts()) == 3


def test_no_limit_is_no_finding() -> None:
    assert Limits().is_empty
    assert check(sample_plan(), Limits()).ok


@pytest.mark.parametrize(
    "given_limits", [{"max_arena": -1}, {"max_outside": -5}, {"max_fragmentation": 1.5}, {"max_fragmentation": -0.1}]
)
def test_impossible_limits_are_refused(given_limits: dict[str, int]) -> None:
    with pytest.raises(InvalidSize):
        Limits(**given_limits)


def test_a_limit_of_nan_is_refused() -> None:
    with pytest.raises(InvalidSize):
        Limits(max_fragmentation=float("nan"))
