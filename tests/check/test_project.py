"""`[tool.memplan]` in pyproject.toml, and the grammar of the rules there."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.analysis.rows import Figures
from memplan.check.check import Metric, parse_rule
from memplan.check.project import find_project
from memplan.errors import InvalidSize, MemplanError

FULL = """
[tool.memplan]
models = [
    "model.py:a", "plan.json", "package.model:b",
    {target = "sub/model.py:c", name = "c", infer = true, fail-over = ["arena:1MiB"]}]
baseline = "base.json"
fail-over = ["arena:+2%"]
"""


def test_everything_is_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(FULL)
    project = find_project(tmp_path)
    assert project is not None
    assert [(e.name, e.target, e.infer) for e in project.entries] == [
        ("model.py:a", "model.py:a", False),
        ("plan.json", "plan.json", False),
        ("package.model:b", "package.model:b", False),
        ("c", "sub/model.py:c", True),
    ]
    assert project.baseline == tmp_path / "base.json"
    assert [
        [r.text for r in rules] for rules in (project.rules or (), project.entries[3].rules or ()) for rules in [rules]
    ] == [["arena:+2%"], ["arena:1MiB"]]


def test_it_is_found_from_below_and_files_are_named_from_there(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(FULL)
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[project]\n")
    project = find_project(tmp_path / "a" / "b")
    assert project is not None
    assert [e.target for e in project.entries][:3] == [
        str(tmp_path / "model.py:a"),
        str(tmp_path / "plan.json"),
        "package.model:b",
    ]
    assert project.entries[0].name == "model.py:a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool", "cannot be read"),
        ("tool = 3", None),
        ("[tool]\nmemplan = 3", "is not a table"),
        ("[tool.memplan]\nmodel = []", "tool.memplan.model: unknown key; known are models"),
        ("[tool.memplan]\nmodels = 'a'", "is not a list"),
        ("[tool.memplan]\nmodels = [3]", r"models\[0\]"),
        ("[tool.memplan]\nmodels = [{infer = true}]", r"models\[0\].target"),
        ("[tool.memplan]\nmodels = [{target = 'a', infer = 1}]", r"models\[0\].infer"),
        ("[tool.memplan]\nmodels = [{target = 'a', x = 1}]", r"models\[0\].x: unknown key"),
        ("[tool.memplan]\nmodels = ['a', 'a']", "two models have the name"),
        ("[tool.memplan]\nbaseline = 3", "is not a text"),
        ("[tool.memplan]\nfail-over = 'arena:3'", "is not a list"),
        ("[tool.memplan]\nfail-over = [3]", "is not a list of texts"),
        ("[tool.memplan]\nfail-over = ['arena']", "tool.memplan.fail-over: 'arena' has no limit"),
    ],
)
def test_faults_are_named_by_their_place(tmp_path: Path, text: str, message: str | None) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    if message is None:
        assert find_project(tmp_path) is None
        return
    with pytest.raises(MemplanError, match=message):
        find_project(tmp_path)


BEFORE = Figures(arena=200, max_live=150, outside=70, parts={}, peak=())


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("arena:12GiB", 12 * 2**30),
        ("arena:+2%", 204),
        ("arena:+0.25 %", Fraction(401, 2)),
        ("arena:+150%", 500),
        ("arena:+1KiB", 1224),
        ("arena:+0", 200),
        ("peak:+0", 150),
        ("outside:+0", 70),
        ("total:+30B", 300),
        ("fragmentation:5%", Fraction(1, 20)),
        ("fragmentation:0.05", Fraction(1, 20)),
        ("fragmentation:+1%", Fraction(26, 100)),
        (" arena : 1 KiB ", 1024),
    ],
)
def test_what_a_rule_allows(text: str, limit: Fraction) -> None:
    rule = parse_rule(text)
    assert rule.limit(BEFORE) == limit
    assert rule.needs_baseline == ("+" in text)


@pytest.mark.parametrize(
    "text",
    ["", "arena", "arena:", "arena:+", "memory:3", "arena:-1", "arena:5%", "arena:++1", "arena:3gib", "fragmentation:2",
     "fragmentation:+200%", "outside:+x%", "arena:1e3", ":3", "arena:+-1%"],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_rule(text)


@given(st.text(max_size=20))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    for prefix in ("", "arena:", "fragmentation:+"):
        with contextlib.suppress(InvalidSize):
            assert parse_rule(prefix + text).metric in Metric
