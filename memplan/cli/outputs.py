"""Checks what a command writes before it computes anything, and finds the repository files of source lines.

Plans name files without folders ("model.py:12"), so that they contain nothing of the machine that made them. The path
in the repository is looked up when an annotation is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from memplan.core.files import require_place
from memplan.errors import InvalidOutput

_OTHERS = frozenset({"node_modules", "site-packages", "__pycache__"})


def require_outputs(outputs: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raise unless every output (by its option) can be written and overwrites no input, source or other output.

    `inputs` are what the command reads: paths, or targets (FILE.py:FACTORY too). Raises `InvalidOutput` for an output
    that is an input, existing Python source, or another output; `UnreadableFile` where no file can be created.
    """
    names = {str(given) for given in inputs if given is not None}
    read = [name for name in {*names, *(name.rpartition(":")[0] for name in names)} if os.path.isfile(name)]
    seen: dict[str, Path] = {}
    for option, path in outputs.items():
        if path is None:
            continue
        require_place(path)
        if path.exists() and not path.is_file():  # a device or a pipe: nothing is overwritten
            continue
        if any(_same(path, other) for other in read):
            raise refused(path, option, "is what the command reads")
        if path.suffix == ".py" and path.exists():
            raise refused(path, option, "is Python source")
        twin = next((other for other, written in seen.items() if _same(path, written)), None)
        if twin is not None:
            raise refused(path, option, f"is what {twin} writes too")
        seen[option] = path


def _same(one: str | Path, two: str | Path) -> bool:
    """Return whether both paths are the same file; links are followed."""
    return os.path.realpath(one) == os.path.realpath(two)


def refused(path: Path, option: str, what: str, hint: str = "name another file") -> InvalidOutput:
    """Return the error for an output that would overwrite `path`; `what` ("is Python source") says why it must not."""
    return InvalidOutput(f"{path} {what}, and would be overwritten", where=option, hint=hint)


class Sources:
    """The current repository's files by name, to find the one that "model.py:12" refers to.

    Its root is GitHub's workspace, the nearest folder with `.git`, or this one. Files in hidden folders and of
    installed packages do not count; links are not followed.
    """

    def __init__(self, sources: Iterable[str]) -> None:
        here = Path.cwd()
        folders, given = (here, *here.parents), os.environ.get("GITHUB_WORKSPACE")
        nearest = next((folder for folder in folders if (folder / ".git").exists()), here)
        self.root = Path(given) if given and Path(given).resolve() in folders else nearest
        wanted = {source.rpartition(":")[0] for source in sources}
        self._files: dict[str, list[Path]] = {name: [] for name in wanted}
        for path in self._walk() if wanted else ():
            if path.name in wanted:
                self._files[path.name].append(path)

    def _walk(self) -> Iterator[Path]:
        for folder, inner, names in os.walk(self.root):
            searched = (n for n in inner if not n.startswith(".") and n not in _OTHERS)
            inner[:] = [n for n in searched if not Path(folder, n, "pyvenv.cfg").exists()]
            yield from (Path(folder, name) for name in names)

    def find(self, source: str, file: str = "") -> tuple[str, int] | None:
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
        path = Path(file).resolve()
        return path.relative_to(self.root.resolve()).as_posix() if path.is_relative_to(self.root.resolve()) else ""


def _is_code(file: Path, number: int) -> bool:
    """Return whether `file` has that line and it is not empty."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    return 0 < number <= len(lines) and lines[number - 1].strip() not in ("", "#")
