"""Results that are kept in a file while they are made, so that a run that was ended goes on where it was."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks.results import Row


class ResumableLines:
    """The lines of a file of results. Without a file, nothing is kept.

    Raises `SystemExit` for a file that was made by other sources: `fingerprint` says which these are.
    """

    def __init__(self, file: Path | None, fingerprint: Callable[[], str]) -> None:
        self.known: list[str] = []
        self._file = file
        if file is None:
            return
        head = json.dumps({"sources": fingerprint()})
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if not lines:
            file.write_text(head + "\n", encoding="utf-8")
        elif lines[0] != head:
            raise SystemExit(f"{file}: made by other sources or another torch; delete it, or name another file")
        self.known = lines[1:]

    def add(self, line: str) -> None:
        """Append a line to the file, if there is one."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def kept_rows(
    models: Iterable[str], file: Path | None, settings: Callable[[], str], measure: Callable[[str], Sequence[Row]]
) -> Iterator[Sequence[Row]]:
    """Yield the rows of each model; those that a run before has kept in the file are not measured again."""
    lines = ResumableLines(file, settings)
    known = dict(map(json.loads, lines.known))
    for model in models:
        if model not in known:
            known[model] = measure(model)
            lines.add(json.dumps([model, known[model]]))
        yield known[model]


def fingerprint_of(root: Path, files: Iterable[Path]) -> str:
    """Return a checksum of source files, by their paths in `root`, and of torch's version."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
