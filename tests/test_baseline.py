"""Baselines: equal after a round trip, refused when they contradict themselves, exact in what they explain."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.baseline import baseline_text, read_baseline, write_baseline
from memplan.check import check
from memplan.errors import InvalidSize, MemplanError
from memplan.figures import figures_of
from memplan.groups import grouped, growths, pattern
from memplan.holders import alive_at
from memplan.plan import Plan
from memplan.rules import Metric, parse_rule
from tests.graph_strategies import plans
from tests.samples import sample_plan


@pytest.mark.parametrize(
    ("module", "row"),
    [
        ("h.0.attn", "h.*.attn"),
        ("h.11.attn.c_attn2", "h.*.attn.c_attn2"),
        ("layers[3].norm", "layers[*].norm"),
        ("0.conv1", "*.conv1"),
        ("", ""),
        ("resnet18.layer4", "resnet18.layer4"),
    ],
)
def test_layers_of_one_kind_share_a_row(module: str, row: str) -> None:
    assert pattern(module) == row


@given(plans())
@settings(deadline=None, max_examples=50)
def test_rows_hold_all_that_is_alive(plan: Plan) -> None:
    alive = alive_at(plan, plan.problem.peak_step)
    rows = grouped(alive)
    assert sum(row.count for row in rows) == len(alive)
    assert sum(row.bytes for row in rows) == plan.max_live
    assert len({row.key for row in rows}) == len(rows)


@given(plans(), plans())
@settings(deadline=None, max_examples=50)
def test_growths_add_up_to_the_difference(one: Plan, two: Plan) -> None:
    rows = growths(figures_of(one).peak, figures_of(two).peak)
    assert sum(row.delta for row in rows) == two.max_live - one.max_live
    assert not growths(figures_of(one).peak, figures_of(one).peak)


@given(plans(), plans(), st.sampled_from(["arena", "peak", "outside", "total"]))
@settings(deadline=None, max_examples=100)
def test_what_grew_explains_the_growth_to_the_byte(one: Plan, two: Plan, figure: str) -> None:
    before, after = figures_of(one), figures_of(two)
    (finding,) = check(two, [parse_rule(f"{figure}:+0")], before).findings
    metric = Metric(figure)
    assert finding.ok == (metric.of(after) <= metric.of(before))
    assert finding.before == metric.of(before)
    if not finding.ok and figure in ("arena", "peak"):
        assert sum(row.delta for row in finding.grown) == finding.excess == metric.of(after) - metric.of(before)


def test_a_gain_is_told() -> None:
    before = figures_of(sample_plan(alignment=512))
    verdict = check(sample_plan(), [parse_rule("arena:+0")], before)
    assert verdict.ok
    assert verdict.gains == ((Metric.ARENA, 1536, 320),)


def test_growth_without_a_baseline_is_bad_input() -> None:
    with pytest.raises(InvalidSize, match="counts from a baseline"):
        check(sample_plan(), [parse_rule("arena:+0")])


@given(st.dictionaries(st.text(max_size=9).filter(lambda t: t.isprintable()), plans(), max_size=3))
@settings(deadline=None, max_examples=30)
def test_what_is_written_is_read_equal(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Plan]) -> None:
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    figures = {name: figures_of(plan) for name, plan in models.items()}
    write_baseline(path, figures)
    assert dict(read_baseline(path)) == figures
    assert path.read_text() == baseline_text(figures)


HEAD = b'{"format": "memplan-baseline-1", "models": '


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b"\xff\xfe\x00", b'{"format": "memplan-baseline-2"}', b"[" * 9999,
                HEAD + b'{"a": {}}}', HEAD + b"3}"]
)  # fmt: skip
def test_what_is_no_baseline_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(MemplanError, match="next step"):
        read_baseline(tmp_path / "b.json")


def test_figures_that_contradict_each_other_are_refused(tmp_path: Path) -> None:
    figures = figures_of(sample_plan())
    (tmp_path / "b.json").write_text(baseline_text({"m": dataclasses.replace(figures, max_live=figures.arena + 1)}))
    with pytest.raises(MemplanError, match="contradict"):
        read_baseline(tmp_path / "b.json")


def test_a_mutated_baseline_is_an_error_or_a_baseline(tmp_path: Path) -> None:
    rng, text = random.Random(7), baseline_text({"m": figures_of(sample_plan())})
    path, read = tmp_path / "b.json", 0
    values: tuple[Any, ...] = (None, -1, 0, 10**30, "", [], {}, 0.5, True, "\ud800")
    for _ in range(400):
        data = json.loads(text)
        at: Any = rng.choice([data, data["models"], data["models"]["m"], data["models"]["m"]["peak"][0]])
        key = rng.choice(list(at))
        if rng.random() < 0.3:
            del at[key]
        else:
            at[key] = rng.choice(values)
        path.write_text(json.dumps(data))
        try:
            read_baseline(path)
            read += 1
        except MemplanError:
            pass
    assert read < 400
