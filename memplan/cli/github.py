"""Output for GitHub Actions: workflow commands on stdout, the job summary, and annotations on the repository's files.

Plans name files without folders ("model.py:12"), so that they contain nothing of the machine that made them. The path
in the repository is looked up when the annotation is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Self

from memplan.check.check import Finding
from memplan.report.verdicts import Judged, Location, escape_message, escape_property, sources_of

_OTHERS = frozenset({"node_modules", "site-packages", "__pycache__"})


def notice(title: str, text: str) -> str:
    """Return a workflow command that shows `text` on the run's page."""
    return f"::notice title={escape_property(title)}::{escape_message(text)}"


def add_summary(markdown: str) -> None:
    """Append to the job's summary; do nothing outside of GitHub Actions. Raises `OSError`."""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(markdown)


class Sources:
    """The repository's files by name, to find the one that "model.py:12" refers to."""

    def __init__(self, root: Path, sources: Iterable[str]) -> None:
        wanted = frozenset(source.rpartition(":")[0] for source in sources)
        self._root = root
        self._files: dict[str, list[Path]] = {}
        for path in _files(root) if wanted else ():
            if path.name in wanted:
                self._files.setdefault(path.name, []).append(path)

    @classmethod
    def of(cls, judged: Sequence[Judged]) -> Self:
        """Return the sources of the current repository that explain the failed findings."""
        failed = (finding for j in judged for finding in j.verdict.findings if not finding.ok)
        return cls(_repository(), (source for finding in failed for source in sources_of(finding)))

    @classmethod
    def here(cls, sources: Iterable[str]) -> Self:
        """Return the files of the current repository that `sources` ("model.py:12") may be lines of."""
        return cls(_repository(), sources)

    @property
    def root(self) -> Path:
        """The folder that paths begin at."""
        return self._root

    def locate(self, judged: Judged, finding: Finding) -> Location | None:
        """Return the line that explains `finding` best, else the file of the model's factory, else None."""
        lines = (self.find(source, judged.file) for source in sources_of(finding))
        known = next((line for line in lines if line), None)
        file = self.relative(judged.file) if judged.file else ""
        return known or ((file, 0) if file else None)

    def find(self, source: str, file: str = "") -> Location | None:
        """Return the file of the repository and the line that `source` refers to, or None if that is not certain.

        It is certain if `file` (a path from the working directory) has this name, or exactly one file of the repository
        does, and the line contains code; otherwise a library may have a file of the same name.
        """
        name, _, number = source.rpartition(":")
        found = [Path(file)] if file and Path(file).name == name else self._files.get(name, [])
        if len(found) != 1 or not number.isdecimal() or not _is_code(found[0], int(number)):
            return None
        path = self.relative(found[0])
        return (path, int(number)) if path else None

    def relative(self, file: str | Path) -> str:
        """Return `file` relative to the repository's root, with slashes, as annotations name it; "" outside of it."""
        try:
            return Path(file).resolve().relative_to(self._root.resolve()).as_posix()
        except (ValueError, OSError):
            return ""


def _repository() -> Path:
    """Return the root of the current repository: GitHub's workspace, the nearest folder with `.git`, or this one."""
    here = Path.cwd()
    folders = (here, *here.parents)
    given = os.environ.get("GITHUB_WORKSPACE")
    if given and Path(given).resolve() in folders:
        return Path(given)
    return next((folder for folder in folders if (folder / ".git").exists()), here)


def _files(root: Path) -> Iterator[Path]:
    """Yield all files except those in hidden folders and of installed packages; links are not followed."""
    for folder, inner, names in os.walk(root):
        inner[:] = [n for n in inner if _is_searched(Path(folder, n))]
        yield from (Path(folder, name) for name in names)


def _is_searched(folder: Path) -> bool:
    return not folder.name.startswith(".") and folder.name not in _OTHERS and not (folder / "pyvenv.cfg").exists()


def _is_code(file: Path, number: int) -> bool:
    """Return whether `file` has that line and it is not empty."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return 0 < number <= len(lines) and lines[number - 1].strip() not in ("", "#")
