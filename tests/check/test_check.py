from __future__ import annotations

import dataclasses
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.analysis.rows import Figures, Group, figures_of
from memplan.check.check import EXPLAINED, Finding, Metric, Verdict, check, parse_rule
from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
from memplan.errors import InvalidSize
from tests.graph_strategies import plans
from tests.samples import sample_plan


def _check(plan: Plan, *rules: str, baseline: Figures | None = None) -> Verdict:
    return check(plan, tuple(map(parse_rule, rules)), baseline)


def test_an_arena_one_byte_too_large_is_named_with_its_buffers() -> None:
    plan = sample_plan()
    (finding,) = _check(plan, f"arena:{plan.arena_size - 1}B").findings
    assert not finding.ok
    assert finding.excess == 1
    assert [holder.module for holder in finding.because] == ["h.0.attn", "", "layers[1].norm"]
    assert finding.because[0].source == "model.py:12"


def test_what_is_outside_is_explained_by_kind() -> None:
    plan = sample_plan()
    (finding,) = _check(plan, "outside:0").findings
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


@given(st.integers(1, 2**45), st.integers(0, 2**20), st.floats(0, 1))
def test_an_exceeded_share_never_reads_like_its_limit(max_live: int, waste: int, limit: float) -> None:
    (finding,) = _check(_fragmented(max_live, max_live + waste), f"fragmentation:{limit:.19f}").findings
    measured, allowed, excess = finding.texts()
    assert finding.ok == (not excess)
    if not finding.ok and finding.measured != finding.limit:
        assert measured != allowed


@given(st.integers(0, 2**45), st.integers(0, 2**45))
def test_an_exceeded_size_never_reads_like_its_limit(arena: int, limit: int) -> None:
    (finding,) = _check(_fragmented(arena, arena), f"arena:{limit}B").findings
    measured, allowed, _ = finding.texts()
    assert finding.ok == (arena <= limit)
    assert (measured == allowed) == (arena == limit)


@given(plans(), st.integers(0, 2000), st.floats(0, 1), st.integers(0, 2000))
def test_a_verdict_is_ok_exactly_when_every_limit_is_kept(plan: Plan, arena: int, share: float, outside: int) -> None:
    limit = Fraction(f"{share:.19f}")
    verdict = _check(plan, f"arena:{arena}B", f"fragmentation:{share:.19f}", f"outside:{outside}B")
    kept = (
        plan.arena_size <= arena,
        Fraction(plan.arena_size - plan.max_live, max(plan.arena_size, 1)) <= limit,
        plan.total - plan.arena_size <= outside,
    )
    assert tuple(f.ok for f in verdict.findings) == kept
    assert verdict.ok == all(kept)
    for finding in verdict.findings:
        assert len(finding.because) <= EXPLAINED
        assert len(finding.texts()) == 3


@pytest.mark.parametrize(("live", "arena", "share"), [(7, 10, 0.3), (93, 100, 0.07), (9, 10, 0.1), (98, 100, 0.02)])
def test_a_share_that_equals_its_limit_keeps_it_whichever_side_its_float_lies(
    live: int, arena: int, share: float
) -> None:
    (finding,) = _check(_fragmented(live, arena), f"fragmentation:{share}").findings
    assert finding.ok
    assert finding.measured == finding.limit == Fraction(arena - live, arena)
    assert not _check(_fragmented(live * 10**6 - 1, arena * 10**6), f"fragmentation:{share}").ok


def _row(module: str, size: int, count: int = 1) -> Group:
    return Group(module=module, op="aten.mm", kind="activation", source="", count=count, bytes=size)


NOW = figures_of(sample_plan())  # arena 320, of which 320 are alive; outside 248


def _explained(rule: str, before: Figures) -> Finding:
    (finding,) = check(sample_plan(), [parse_rule(rule)], before).findings
    return finding


def test_what_grew_is_told_by_row_largest_first_and_adds_up() -> None:
    before = dataclasses.replace(NOW, arena=200, max_live=150, peak=(_row("h.*.attn", 150),))
    for rule, excess in (("arena:+0", 120), ("peak:+0", 170)):
        finding = _explained(rule, before)
        assert sum(row.delta for row in finding.grown) == finding.excess == excess
        deltas = [row.delta for row in finding.grown]
        assert deltas == sorted(deltas, reverse=True)
        assert any(row.kind == "fragmentation" and row.delta == -50 for row in finding.grown) == (rule == "arena:+0")
        assert not finding.because
        assert not finding.parts
    share = _explained("fragmentation:0%", dataclasses.replace(NOW, arena=320))
    assert share.ok


def test_a_share_that_grew_is_explained_by_what_is_lost() -> None:
    plan = _fragmented(260, 320)
    before = dataclasses.replace(figures_of(plan), arena=300)
    (finding,) = check(plan, [parse_rule("fragmentation:+0%")], before).findings
    assert not finding.ok
    assert [(row.kind, row.bytes_before, row.bytes_after) for row in finding.grown] == [("fragmentation", 40, 60)]


def test_what_grew_outside_is_told_by_kind_both_ways() -> None:
    parts = {"parameters": NOW.parts["parameters"] - 30, "gone": 10}
    parts |= {kind: size for kind, size in NOW.parts.items() if kind != "parameters"}
    before = dataclasses.replace(NOW, parts=parts, outside=NOW.outside - 20)
    finding = _explained("outside:+0", before)
    assert [(row.kind, row.bytes_before, row.bytes_after, row.delta) for row in finding.grown] == [
        ("parameters", 70, 100, 30),
        ("gone", 10, 0, -10),
    ]
    assert not finding.parts
    assert [row.kind for row in _explained("total:+0", before).grown] == ["parameters", "gone"]
    lost = _explained("total:+0", dataclasses.replace(before, arena=321))
    assert [(row.kind, row.delta) for row in lost.grown] == [("parameters", 30), ("fragmentation", -1), ("gone", -10)]


def test_a_limit_over_which_it_always_was_is_explained_by_who_is_there() -> None:
    same = _explained("arena:319B", NOW)
    assert (same.grown, same.parts, same.before) == ((), (), Fraction(320))
    assert [holder.module for holder in same.because] == ["h.0.attn", "", "layers[1].norm"]
    for rule in ("peak:259B", "total:567B"):
        other = _explained(rule, NOW)
        assert (len(other.because), other.parts, other.ok) == (3, (), False)
    outside = _explained("outside:247B", NOW)
    assert (outside.grown, outside.because) == ((), ())
    sizes = [size for _, size in outside.parts]
    assert sizes == sorted(sizes, reverse=True)
    assert dict(outside.parts) == dict(NOW.parts)
    assert sum(sizes) >= 248
    kept = _explained("arena:320B", dataclasses.replace(NOW, arena=300, max_live=300))
    assert (kept.ok, kept.grown, kept.because, kept.parts, kept.excess) == (True, (), (), (), Fraction(0))


def test_bytes_are_whole_in_words_and_exact_beyond_a_limit() -> None:
    finding = _explained("arena:+0.25%", dataclasses.replace(NOW, arena=210))
    assert finding.limit == Fraction(84210, 400)
    assert finding.texts() == ("320 B", "210 B", "110 B")
    large = Finding(name="arena", measured=Fraction(5000), limit=Fraction(4999), is_share=False, ok=False)
    assert large.texts() == ("4.88 KiB (5,000 B)", "4.88 KiB (4,999 B)", "1 B")
    assert dataclasses.replace(large, limit=Fraction(5001), ok=True).texts() == (
        "4.88 KiB (5,000 B)",
        "4.88 KiB (5,001 B)",
        "",
    )


def test_gains_are_told_for_arena_and_outside_only_where_something_is_gained() -> None:
    before = dataclasses.replace(NOW, arena=321, outside=249)
    verdict = check(sample_plan(), (), before)
    assert verdict.gains == ((Metric.ARENA, 321, 320), (Metric.OUTSIDE, 249, 248))
    assert check(sample_plan(), (), NOW).gains == ()
    assert check(sample_plan(), (), dataclasses.replace(NOW, arena=319, outside=247)).gains == ()
    assert check(sample_plan(), ()).gains == ()


def test_a_rule_without_its_baseline_names_the_plan() -> None:
    with pytest.raises(InvalidSize, match=r"'arena:\+0' is relative to a baseline, and sample has none"):
        check(sample_plan(), [parse_rule("arena:+0")])
    with pytest.raises(InvalidSize, match=r"and the plan has none"):
        check(dataclasses.replace(sample_plan(), model=""), [parse_rule("arena:+0")])
