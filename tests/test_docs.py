"""The documentation names everything that there is, and nothing that there is not."""

from __future__ import annotations

import re
from pathlib import Path

import memplan

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
