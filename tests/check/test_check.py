from __future__ import annotations

import dataclasses
from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from memplan.analysis.rows import Figures, Group, figures_of
from memplan.check.check import EXPLAINED, Finding, Verdict, check, parse_rule
from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
from tests.graph_strategies import plans
from tests.samples import sample_plan


def _check(plan: Plan, *rules: str, baseline: Figures | None = None) -> Verdict:
    return check(plan, tuple(map(parse_rule, rules)), baseline)


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
