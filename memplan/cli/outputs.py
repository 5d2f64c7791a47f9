"""Where a command writes, looked at before it computes anything: no file that someone needs is overwritten."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from memplan.core.files import require_place
from memplan.errors import InvalidOutput


def require_outputs(outputs: Mapping[str, Path | None], *inputs: str | Path | None) -> None:
    """Raise unless every output (by its option) can be written where it is wanted, and overwrites nothing.

    `inputs` are what the command reads: paths, or targets (FILE.py:FACTORY too). Raises `InvalidOutput` for an output
    that is an input, Python source that exists, or another output; `UnreadableFile` where no file can be.
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


def _files(target: str) -> list[Path]:
    """The files that `target` names: as it stands, or before the colon of a factory's name."""
    names = {target, target.rpartition(":")[0]} - {""}
    return [Path(name) for name in sorted(names) if os.path.isfile(name)]


def _same(one: Path, two: Path) -> bool:
    """Whether both are one file; links count as what they lead to."""
    try:
        return one.resolve() == two.resolve() or (one.exists() and two.exists() and one.samefile(two))
    except OSError:
        return False


def refused(path: Path, option: str, what: str, hint: str = "name another file") -> InvalidOutput:
    """The error for an output that would overwrite `path`, and `what` ("is Python source") is why it must not."""
    return InvalidOutput(f"{path} {what}, and would be overwritten", where=option, hint=hint)
