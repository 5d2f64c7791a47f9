"""Links from the source lines that a page names to files: in the editor, or by the template of `--source-url`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from memplan.cli.github import Sources
from memplan.report.source_links import editor_link, filled


def links_of(sources: Iterable[str], template: str | None, target: str = "") -> dict[str, str]:
    """Return addresses by source line ("model.py:12"), of those of `sources` whose file is known for certain.

    That is one with this name where there is no second one in the repository around the working directory, or the file
    of `target` (FILE.py:FACTORY). Without a `template`, addresses open VS Code. With one, {path} is the path from the
    repository's root, and {file} the name of the file, which is known for every line.
    """
    lines = sorted(set(sources) - {""})
    file = target.rpartition(":")[0]
    return dict(_links(Sources.here(lines), lines, template, file if file.endswith(".py") else ""))


def _links(files: Sources, lines: Iterable[str], template: str | None, file: str) -> Iterator[tuple[str, str]]:
    for line in lines:
        found = files.find(line, file)
        path = found[0] if found else None
        if template is not None:
            link = filled(template, line, path)
        else:
            link = editor_link(line, (files.root / Path(path)).resolve().as_posix()) if path is not None else None
        if link is not None:
            yield line, link
