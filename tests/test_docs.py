"""The documentation names everything that there is, and errors lead to its headings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import memplan
from memplan.errors import MemplanError, UnsupportedGraph

ROOT = Path(__file__).parent.parent
IN_ERRORS = {"MemplanError"}  # on the page as a part of memplan.errors
NOT_SHOWN = {"__version__"}  # a text


def _page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def test_the_reference_has_every_public_name() -> None:
    shown = re.findall(r"^::: memplan\.(\S+)$", _page("api.md"), flags=re.MULTILINE)
    assert len(set(shown)) == len(shown)
    assert {*shown, *IN_ERRORS, *NOT_SHOWN} == {*memplan.__all__, "errors"}
    assert all(hasattr(memplan.errors, name) for name in IN_ERRORS)


INSIDE = ("graph", "order", "budget", "placement", "program", "arena", "kernels")
MOST_WORDS = 800


def _inside() -> dict[str, str]:
    """The pages about the inside, by the names of their files."""
    return {name: _page(name) for name in ("architecture.md", *(f"inside/{concept}.md" for concept in INSIDE))}


def test_files_that_the_architecture_names_exist() -> None:
    text = "".join(_inside().values()) + _page("forms-of-an-op.md") + (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    folders = [ROOT / name for name in ("docs", "memplan", "scripts", "tests")]
    there = [*folders, *(path for folder in folders for path in folder.rglob("*"))]
    paths = {f"/{path.relative_to(ROOT).as_posix()}" for path in there}
    named = set(re.findall(r"`([\w./]*\.py|[\w/]+/)`", text))
    assert len(named) > 60
    missing = [name for name in named if not any(path.endswith(f"/{name.rstrip('/')}") for path in paths)]
    assert sorted(missing) == []


def test_a_page_about_the_inside_is_short() -> None:
    assert {path.name for path in (ROOT / "docs" / "inside").iterdir()} == {f"{concept}.md" for concept in INSIDE}
    assert [name for name, text in _inside().items() if len(text.split()) >= MOST_WORDS] == []


def test_every_package_is_in_the_architecture() -> None:
    text = _page("architecture.md")
    packages = [path.parent.name for path in (ROOT / "memplan").glob("*/__init__.py")]
    assert len(packages) > 10
    assert [name for name in packages if f"{name}/" not in text] == []


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
