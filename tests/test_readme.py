"""What README.md, CONTRIBUTING.md and docs/ show is run, page by page, in the order in which a reader meets it.

- A Python block is run in the namespace of its page. One titled "Refused" must raise a `MemplanError` whose `see` is
  the id of the heading above it, and a text block titled "The error" below it must be a part of what it says.
- A block whose title is a file name is written to that file, for the blocks below it.
- `memplan ...` and `pytest FILE` in a shell block are run and must succeed; of every other command, what it names must
  exist.
- A TOML block must be a `pyproject.toml` in which memplan finds models.
- A text block without a title is output or a diagram. Other languages are errors.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from memplan.check.project import find_project
from memplan.cli import main
from memplan.errors import MemplanError

ROOT = Path(__file__).parent.parent
PAGES = [
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
]
REFUSED, ERROR = "Refused", "The error"
_FENCE = re.compile(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
_HEADING_ID = re.compile(r"^#+ .* \{#([a-z-]+)\}$", flags=re.MULTILINE)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A fenced block.

    `place` is the page and line, for messages; `title` is "" where it has none, and so is `heading`, the id of the
    nearest heading above it that has one.
    """

    place: str
    language: str
    title: str
    text: str
    heading: str = ""


def blocks_of(page: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order."""
    source = (ROOT / page).read_text(encoding="utf-8")
    for match in _FENCE.finditer(source):
        indent, language, attributes, text = match.groups()
        title = re.search(r'title="([^"]*)"', attributes)
        headings = _HEADING_ID.findall(source, 0, match.start())
        yield Block(
            place=f"{page}:{source.count(chr(10), 0, match.start()) + 1}",
            language=language,
            title=title[1] if title else "",
            text=re.sub(rf"^{indent}", "", text, flags=re.MULTILINE),
            heading=headings[-1] if headings else "",
        )


class Page:
    """What the blocks of one page have in common: Python names, files in `folder`, and the last error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.said = ""

    def run(self, block: Block) -> None:
        """Run one block, or fail with its place."""
        if re.fullmatch(r"[\w.-]+\.\w+", block.title):
            (self.folder / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            self._python(block)
        elif block.language == "sh":
            for line in block.text.splitlines():
                self._command(shlex.split(line, comments=True), f"{block.place}: {line}")
        elif block.language == "toml":
            self._project(block)
        elif block.title == ERROR:
            assert _words(block.text) in _words(self.said), (block.place, self.said)
        else:
            assert block.language == "text", f"{block.place}: who runs {block.language!r}?"

    def _python(self, block: Block) -> None:
        code = compile(block.text, block.place, "exec")
        if block.title == REFUSED:
            with pytest.raises(MemplanError) as error:
                exec(code, self.names)
            self.said = str(error.value)
            assert block.heading in ("", error.value.see), (block.place, self.said)
        else:
            exec(code, self.names)

    def _project(self, block: Block) -> None:
        folder = self.folder / "project"
        folder.mkdir()
        (folder / "pyproject.toml").write_text(block.text, encoding="utf-8")
        project = find_project(folder)
        assert project is not None, block.place
        assert project.entries, block.place

    def _command(self, words: list[str], place: str) -> None:
        if not words:
            return
        program, *rest = words
        if program == "memplan":
            if rest != ["demo"]:  # which has a test of its own, and takes a minute
                assert main(rest) == 0, place
        elif program == "pytest":
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *rest]
            done = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, (place, done.stdout, done.stderr)
        elif program.startswith((".venv/bin/", "python")) and rest[:1] == ["-m"]:
            assert find_spec(rest[1]), place
        else:
            _require_known(program, rest, place)


def _words(text: str) -> str:
    return " ".join(text.split())


def _require_known(program: str, rest: list[str], place: str) -> None:
    """Fail unless a command that is not run names files and extras of this repository, or a tool of its extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    for names in re.findall(r"\[([\w,]+)\]", " ".join(rest)) if program == "pip" else []:
        assert set(names.split(",")) <= set(extras), place
    scripts = [word for word in (program, *rest) if word.startswith(("scripts/", ".ci/"))]
    assert all((ROOT / script).is_file() for script in scripts), place
    tools = {re.split(r"[\[>=]", package)[0] for packages in extras.values() for package in packages}
    tools |= {"mkdocs", "lint-imports", "pip", "git"}  # by another name than their package's, or always there
    assert scripts or program.removeprefix(".venv/bin/") in tools, place


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    shown = Page(tmp_path)
    for block in blocks_of(page):
        shown.run(block)


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    source = (ROOT / page).read_text(encoding="utf-8")
    for link in _LINK.findall(source):
        assert (ROOT / page).parent.joinpath(link).exists(), f"{page}: {link}"


def test_what_was_found_is_what_is_shown() -> None:
    """The tests above hold for nothing if no block is found."""
    found = [block for page in PAGES for block in blocks_of(page)]
    assert sum(block.language == "python" for block in found) > 40
    assert sum(block.title == REFUSED for block in found) > 20
    assert sum(line.startswith("memplan ") for block in found for line in block.text.splitlines()) > 15


def test_a_page_that_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    wrong: dict[tuple[str, str, str], type[BaseException]] = {
        ("python", "", "1 / 0"): ZeroDivisionError,
        ("python", REFUSED, "pass"): pytest.fail.Exception,
        ("text", ERROR, "what no error says"): AssertionError,
        ("sh", "", "memplan solve missing.csv"): AssertionError,
        ("sh", "", "scripts/missing.sh"): AssertionError,
        ("sh", "", "pip install 'memplan[missing]'"): AssertionError,
        ("sh", "", "python -m missing"): AssertionError,
        ("sh", "", "missing --help"): AssertionError,
        ("toml", "", "[tool.memplan]\nmodels = []"): AssertionError,
        ("ruby", "", "puts 1"): AssertionError,
    }
    for (language, title, text), error in wrong.items():
        with pytest.raises(error):
            Page(tmp_path).run(Block(place="here", language=language, title=title, text=text))
