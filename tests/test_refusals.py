"""Errors lead to the headings of docs/refused.md: `see=` of what is raised, against the ids of the page."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from memplan import errors
from memplan.errors import BudgetInfeasible, InputMismatch, MemplanError, UnsupportedGraph

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/refused.md").read_text(encoding="utf-8")
HEADINGS = re.findall(r"^### .* \{#([a-z-]+)\}$", PAGE, flags=re.MULTILINE)
# Errors of these classes refuse a model, a call or a combination of options: each has a heading of its own.
REFUSALS = {"NoBackward", "StaleActivationsError", "UnsupportedCall", "UnsupportedDevice", "UnsupportedGraph"}


def _trees() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "memplan").rglob("*.py")):
        yield path, ast.parse(path.read_text(encoding="utf-8"))


def _named(tree: ast.Module) -> Iterator[str]:
    """The ids in a module: values of `see=...`, of `see = ...`, and of the last of several names that are assigned."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "see" and isinstance(node.value, ast.Constant):
            yield str(node.value.value)
        elif isinstance(node, ast.Assign):
            (target,) = node.targets[:1]
            names = target.elts if isinstance(target, ast.Tuple) else [target]
            values = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value]
            for name, value in zip(names, values, strict=False):
                if isinstance(name, ast.Name) and name.id == "see" and isinstance(value, ast.Constant):
                    yield str(value.value)


def test_every_heading_of_the_page_has_an_id_and_no_two_the_same() -> None:
    assert len(HEADINGS) == PAGE.count("\n### ") > 60
    assert len(set(HEADINGS)) == len(HEADINGS)


def test_every_id_that_an_error_names_is_a_heading_and_every_heading_is_named_by_an_error() -> None:
    assert {see for _, tree in _trees() for see in _named(tree)} == set(HEADINGS)


def test_every_refusal_names_a_heading() -> None:
    calls = [
        (f"{path.relative_to(ROOT)}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path, tree in _trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in REFUSALS
    ]
    assert len(calls) > 80
    assert [place for place, keywords in calls if "see" not in keywords] == []


def test_the_heading_is_the_last_line_of_an_error() -> None:
    error = UnsupportedGraph("Model", "has backward hooks", "remove them", see="backward-hooks")
    assert str(error).splitlines() == [
        "Model: has backward hooks",
        "  next step: remove them",
        "  more: memplan help backward-hooks",
    ]
    assert str(MemplanError("is wrong")) == "is wrong"


@pytest.mark.parametrize(
    ("error", "see"),
    [
        (InputMismatch("is another shape"), "other-call"),
        (InputMismatch("has other hooks", see="other-model"), "other-model"),
        (errors.ShapeOutOfRange("is too large"), "shape-out-of-range"),
        (BudgetInfeasible("does not fit", op="mm", smallest=1), "budget"),
        (MemplanError("is wrong"), None),
    ],
)
def test_an_error_names_the_heading_of_its_class_unless_it_has_one_of_its_own(
    error: MemplanError, see: str | None
) -> None:
    assert error.see == see
