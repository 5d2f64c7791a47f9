"""The consoles of the command line: results go to stdout, errors and progress to stderr."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memplan.errors import MemplanError

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import Console

LOG_WIDTH = 1000  # characters: so wide that no name of a model is broken, and a table takes what it needs


@dataclass(slots=True)
class Settings:
    """The options that come before the command."""

    traceback: bool = False


def console() -> Console:
    """Return a console for the current standard output; without a terminal, lines may be `LOG_WIDTH` wide."""
    return _console(stderr=False)


def error_console() -> Console:
    """Return a console for the current standard error."""
    return _console(stderr=True)


def _console(*, stderr: bool) -> Console:
    from rich.console import Console

    made = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if not is_live(made) and "COLUMNS" not in os.environ:
        made.width = LOG_WIDTH
    return made


def is_live(screen: Console) -> bool:
    """Return whether a console writes to a real terminal, on which a line can change; FORCE_COLOR makes none."""
    return screen.is_terminal and screen.file.isatty()


@contextlib.contextmanager
def progress(doing: str) -> Iterator[None]:
    """Show on a terminal, while the context lasts, that work is under way; print nothing elsewhere."""
    screen = error_console()
    if not is_live(screen):
        yield
        return
    from rich.text import Text

    with screen.status(Text(f"{doing} ..."), spinner="line"):
        yield


def wrote(*paths: Path | None) -> None:
    """Print to stderr which files were written, and their sizes; None stands for none."""
    from rich.text import Text

    from memplan.core.units import format_bytes

    for path in paths:
        if path is not None:
            size = f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""
            error_console().print(Text(f"wrote {path}{size}"), soft_wrap=True)


def show_error(error: MemplanError) -> None:
    """Print an error to stderr: what, where and the next step, without line breaks so that paths can be copied."""
    from rich.text import Text

    # A message may quote a file or a model: escape control characters, so that they do not reach the terminal.
    lines = "\n".join(
        "".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in str(error).splitlines()
    )
    error_console().print(Text.assemble(("error: ", "bold red"), lines), soft_wrap=True)


def tolerate_encodings() -> None:
    """Make stdout and stderr escape characters that the terminal's encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
