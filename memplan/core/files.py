"""Writes files completely or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from memplan.core.jsonio import require_path
from memplan.errors import UnreadableFile


def write_atomic(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file in one step: it has the new content or is unchanged, even if writing is interrupted.

    A link is followed; a device or a pipe is written to directly. Raises `UnreadableFile` if the file cannot be
    written.
    """
    path = Path(require_path(path, "name a file that can be written"))
    require_place(path)
    with _named(path):
        data = content if isinstance(content, bytes) else content.encode()
        if path.exists() and not path.is_file():
            path.write_bytes(data)
            return
        target = path.resolve()
        scratch = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        try:
            scratch.write_bytes(data)
            scratch.replace(target)
        finally:  # it no longer exists once it has replaced the target
            with contextlib.suppress(OSError):
                scratch.unlink()


def require_place(path: Path) -> None:
    """Raise `UnreadableFile` unless `path` can be a file: its folder exists, and `path` is not a folder itself."""
    with _named(path):
        if path.exists() and not path.is_file() and not path.is_dir():  # a device or a pipe
            return
        folder = path.resolve().parent
        if path.is_dir():
            fault, hint = "it is a folder", "give the name of a file"
        elif not folder.exists():
            fault, hint = f"there is no folder {path.parent}", "make the folder first, or name another one"
        elif not folder.is_dir():
            fault, hint = f"{path.parent} is not a folder", "name a folder that exists"
        else:
            return
    raise UnreadableFile(f"cannot be written: {fault}", where=str(path), hint=hint)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Raise errors of the operating system as `UnreadableFile` that names `path` and no temporary file.

    A `ValueError` means that the name or the text is not possible for a file, a `RuntimeError` that a link leads to
    itself.
    """
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        hint = "name a file that can be written"
        raise UnreadableFile(f"cannot be written: {reason}", where=str(path), hint=hint) from error
