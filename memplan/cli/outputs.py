"""Checks the output files of a command before it computes anything, so that it overwrites no file that is needed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from memplan.core.files import require_place
from memplan.errors import InvalidOutput

SOURCE_URL_HELP = "links of source lines, such as https://.../{path}#L{line}; without it they open VS Code."


def require_outputs(outputs: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raise unless every output (by its option) can be written and overwrites no input, source or other output.

    `inputs` are what the command reads: paths, or targets (FILE.py:FACTORY too). Raises `InvalidOutput` for an output
    that is an input, existing Python source, or another output; `UnreadableFile` where no file can be created.
    """
    read = [path for given in inputs if given is not None for path in _files(str(given))]
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


def require_source_url(template: str | None, page: Path | None) -> None:
    """Raise `InvalidTemplate` unless `template` is None, or one for links of source lines on a `page` to be written."""
    from memplan.errors import InvalidTemplate
    from memplan.report.source_links import require_template

    if template is None:
        return
    require_template(template, "--source-url")
    if page is None:
        raise InvalidTemplate(
            "there is no page whose links it makes", where="--source-url", hint="give --html FILE too"
        )


def _files(target: str) -> list[Path]:
    """Return the existing files that `target` names, as a whole or before the colon of a factory's name."""
    names = {target, target.rpartition(":")[0]} - {""}
    return [Path(name) for name in sorted(names) if os.path.isfile(name)]


def _same(one: Path, two: Path) -> bool:
    """Return whether both paths are the same file; links are followed."""
    try:
        return one.resolve() == two.resolve() or (one.exists() and two.exists() and one.samefile(two))
    except (OSError, RuntimeError):  # a link that leads to itself
        return False


def refused(path: Path, option: str, what: str, hint: str = "name another file") -> InvalidOutput:
    """Return the error for an output that would overwrite `path`; `what` ("is Python source") says why it must not."""
    return InvalidOutput(f"{path} {what}, and would be overwritten", where=option, hint=hint)
