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

from memplan.analysis.buffers import alive_at
from memplan.analysis.rows import figures_of, grouped, growths, pattern
from memplan.check.baseline import baseline_text, read_baseline, update_baseline, write_baseline
from memplan.check.check import Metric, check, parse_rule
from memplan.core.plan import Plan
from memplan.errors import InvalidPlan, MemplanError, UnreadableFile
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
def test_rows_hold_all_that_is_alive(plan: Plan) -> None:
    alive = alive_at(plan, plan.problem.peak_step)
    rows = grouped(alive)
    assert sum(row.count for row in rows) == len(alive)
    assert sum(row.bytes for row in rows) == plan.max_live
    assert len({row.key for row in rows}) == len(rows)


@given(plans(), plans())
def test_growths_add_up_to_the_difference(one: Plan, two: Plan) -> None:
    rows = growths(figures_of(one).peak, figures_of(two).peak)
    assert sum(row.delta for row in rows) == two.max_live - one.max_live
    assert not growths(figures_of(one).peak, figures_of(one).peak)


@given(plans(), plans(), st.sampled_from(["arena", "peak", "outside", "total"]))
def test_what_grew_explains_the_growth_to_the_byte(one: Plan, two: Plan, figure: str) -> None:
    before, after = figures_of(one), figures_of(two)
    (finding,) = check(two, [parse_rule(f"{figure}:+0")], before).findings
    metric = Metric(figure)
    assert finding.ok == (metric.of(after) <= metric.of(before))
    assert finding.before == metric.of(before)
    if not finding.ok and figure in ("arena", "peak"):
        assert sum(row.delta for row in finding.grown) == finding.excess == metric.of(after) - metric.of(before)


@given(st.dictionaries(st.text(max_size=9).filter(lambda t: t.isprintable()), plans(), max_size=3))
@settings(max_examples=30)
def test_what_is_written_is_read_equal(tmp_path_factory: pytest.TempPathFactory, models: dict[str, Plan]) -> None:
    path = tmp_path_factory.mktemp("baseline") / "b.json"
    figures = {name: figures_of(plan) for name, plan in models.items()}
    write_baseline(path, figures)
    assert dict(read_baseline(path)) == figures
    assert path.read_text() == baseline_text(figures)


FIGURES = figures_of(sample_plan())
PEAK = FIGURES.peak[0]


@pytest.mark.parametrize(
    "change",
    [
        {"max_live": FIGURES.arena + 1},
        {"arena": FIGURES.max_live - 1},
        {"max_live": FIGURES.max_live - 1},
        {"outside": -1},
        {"parts": {"parameters": -1}},
        {"peak": ()},
        {"peak": (dataclasses.replace(PEAK, bytes=FIGURES.max_live + 1), dataclasses.replace(PEAK, bytes=-1))},
        {"arena": 5, "max_live": -1, "peak": (dataclasses.replace(PEAK, bytes=-1),)},
    ],
)
def test_figures_that_contradict_each_other_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "b.json"
    path.write_text(baseline_text({"ok": FIGURES, "m": dataclasses.replace(FIGURES, **change)}))
    with pytest.raises(InvalidPlan) as caught:
        read_baseline(path)
    assert caught.value.what == "the figures contradict each other"
    assert caught.value.where == f"{path}: models.m"
    assert caught.value.hint == "write it anew: memplan check ... --baseline FILE --update-baseline"


@pytest.mark.parametrize(
    ("content", "error", "what"),
    [
        (b"{", UnreadableFile, "is not JSON"),
        (b"[" * 99999, UnreadableFile, "is not JSON"),
        (b"[]", InvalidPlan, "is not a baseline of format 'memplan-baseline-1': it says none"),
        (b'{"models": {}}', InvalidPlan, "is not a baseline of format 'memplan-baseline-1': it says None"),
        (
            b'{"format": "x", "models": {}}',
            InvalidPlan,
            "is not a baseline of format 'memplan-baseline-1': it says 'x'",
        ),
        (b'{"format": "memplan-baseline-1", "models": []}', InvalidPlan, "is not a baseline of format 'memplan-bas"),
        (b'{"format": "memplan-baseline-1", "models": {"a": 1}}', InvalidPlan, "1 is not of type object"),
    ],
)
def test_each_fault_of_a_baseline_has_its_type(
    tmp_path: Path, content: bytes, error: type[UnreadableFile], what: str
) -> None:
    (tmp_path / "b.json").write_bytes(content)
    with pytest.raises(UnreadableFile) as caught:
        read_baseline(tmp_path / "b.json")
    assert type(caught.value) is error
    assert caught.value.what.startswith(what)
    with pytest.raises(UnreadableFile) as caught:
        read_baseline(tmp_path / "none.json")
    assert type(caught.value) is UnreadableFile
    assert caught.value.what == "cannot be read: No such file or directory"


def test_an_update_keeps_or_replaces_what_is_there(tmp_path: Path) -> None:
    path, other = tmp_path / "b.json", dataclasses.replace(FIGURES, arena=FIGURES.arena + 1)
    assert update_baseline(path, {"a": FIGURES}) == {}
    assert update_baseline(path, {"b": FIGURES}) == {"a": FIGURES}
    assert update_baseline(path, {"a": other}) == {"a": FIGURES, "b": FIGURES}
    assert read_baseline(path) == {"a": other, "b": FIGURES}
    assert update_baseline(path, {"c": FIGURES}, whole=True) == {"a": other, "b": FIGURES}
    assert read_baseline(path) == {"c": FIGURES}
    assert [file.name for file in tmp_path.iterdir()] == ["b.json"]
    path.write_text("{")
    with pytest.raises(UnreadableFile, match="is not JSON"):
        update_baseline(path, {"d": FIGURES})
    assert path.read_text() == "{"


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
