"""Shares among commands: consoles (results go to stdout, errors and progress to stderr), Ctrl-C, options."""

from __future__ import annotations

import contextlib
import enum
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Self

import typer

from memplan.core.timed import live_line
from memplan.errors import MemplanError

if TYPE_CHECKING:
    from rich.console import Console

    from memplan.report.sections import Form

LOG_WIDTH = 1000  # characters: so wide that no name of a model is broken, and a table takes what it needs
INTERRUPTED = 130  # the exit code: 128 + SIGINT, as shells report it


# -- options -------------------------------------------------------------------------------------------------


class Format(enum.StrEnum):
    """The form in which a result is printed; github: a table and a summary of the job (for a check, annotations)."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    GITHUB = "github"


def opt(spec: str, text: str, **more: Any) -> Any:
    """Return an option such as "--output,-o FILE": its names, and what it takes if it takes a value."""
    names, _, metavar = spec.partition(" ")
    found = (name.replace("_", " ") for name in names.split(","))
    return typer.Option(*found, metavar=metavar or None, help=text, **more)


TARGET = "plan.json, FILE.py:FACTORY or package.module:FACTORY."

Infer = Annotated[bool, opt("--infer/--train,--no-train", "Plan the forward alone, without gradients (train=False).")]
Ranks = Annotated[int | None, opt("--ranks N", "Plan one of N ranks that share the parameters.")]
Gpu = Annotated[str | None, opt("--target GPU", "Plan for a GPU that need not be here: h100, a100, sm90:80GiB, ...")]
Costs = Annotated[str | None, opt("--costs DEVICE|FILE", "The costs of predicted times: a GPU (as --target), or cpu.")]
Budget = Annotated[str | None, opt("--budget SIZE", "Evict what exceeds this total: 8GiB, 50% or min.")]
Kernels = Annotated[
    str | None, opt("--kernels KIND", "inductor: generated (default on a GPU); aten: eager's (on the CPU).")
]
HostBudget = Annotated[str | None, opt("--host-budget SIZE", "The most bytes of copies on the host.")]
PinnedBudget = Annotated[str | None, opt("--pinned-budget SIZE", "The same where they are page-locked: for CUDA.")]
Reserve = Annotated[str | None, opt("--reserve SIZE", "Set more bytes aside, in place of the optimizer's state.")]
Optimizer = Annotated[str, opt("--optimizer NAME", "Whose state a training step's total has: AdamW, SGD, ..., none.")]
Solver = Annotated[str | None, opt("--solver NAME", "Which solver places the buffers: auto or its name.")]
TimeLimit = Annotated[float | None, opt("--time-limit SECONDS", "How long a solver may take.")]
Html = Annotated[Path | None, opt("--html FILE", "Draw it as one page, to zoom and hover.")]
Shown = Annotated[Format, opt("--format", "What to print; github: a table, annotations and a job summary.")]


# -- consoles ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Settings:
    """The options that come before the command."""

    traceback: bool = False


def console(*, stderr: bool = False) -> Console:
    """Return a console for the current standard output; without a terminal, lines may be `LOG_WIDTH` wide."""
    from rich.console import Console

    made = Console(file=sys.stderr if stderr else sys.stdout, highlight=False)
    if not is_live(made) and "COLUMNS" not in os.environ:
        made.width = LOG_WIDTH
    return made


def error_console() -> Console:
    """Return a console for the current standard error."""
    return console(stderr=True)


def is_live(screen: Console) -> bool:
    """Return whether a console writes to a real terminal, on which a line can change; FORCE_COLOR makes none."""
    return screen.is_terminal and screen.file.isatty()


def show(form: Form, how: Format) -> None:
    """Print a form; for GitHub, add it to the job's summary too. Raises `OSError`."""
    if how is Format.JSON:
        typer.echo(json.dumps(form.data, indent=2, allow_nan=False))
        return
    from memplan.report.sections import markdown

    if how is Format.MARKDOWN:
        typer.echo(markdown(form), nl=False)
        return
    from memplan.report.terminal import rendered

    screen = console()
    screen.print(rendered(form, screen.width))
    if how is Format.GITHUB and (summary := os.environ.get("GITHUB_STEP_SUMMARY")):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(markdown(form))


def say(text: str, *, stderr: bool = False, style: str = "") -> None:
    """Print one line as it is, unbroken; control characters are escaped, for a name of a file or model has any."""
    from rich.text import Text

    lines = ("".join(c if c.isprintable() else ascii(c)[1:-1] for c in line) for line in text.splitlines())
    console(stderr=stderr).print(Text("\n".join(lines), style), soft_wrap=True)


def show_error(error: MemplanError) -> None:
    """Print an error to stderr: what, where and the next step."""
    error_console().print("error: ", style="bold red", end="")
    say(str(error), stderr=True)


def wrote(*paths: Path | None) -> None:
    """Print to stderr which files were written, and their sizes; None stands for none."""
    from memplan.core.units import format_bytes

    for path in filter(None, paths):
        say(f"wrote {path}" + (f" ({format_bytes(path.stat().st_size)})" if path.is_file() else ""), stderr=True)


def tolerate_encodings() -> None:
    """Make stdout and stderr escape characters that the terminal's encoding lacks, instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def stages(doing: str) -> Iterator[Callable[[str], object]]:
    """Show on stderr that work is under way, and yield a function that shows its stage, with the seconds so far.

    A terminal has one changing line; a log has a line for each stage that is told.
    """
    screen, began = error_console(), time.perf_counter()
    if not is_live(screen):
        yield lambda stage: say(f"{time.perf_counter() - began:6.1f} s  {doing}: {stage}", stderr=True)
        return
    with live_line(doing, screen) as tell:
        yield tell


# -- Ctrl-C --------------------------------------------------------------------------------------------------


class Interrupts:
    """A context that records interrupts and passes them on to the previous handler.

    Compiled kernels and libraries that call back into Python turn a `KeyboardInterrupt` into errors of their own, or
    drop it. So the signal itself is recorded, and the exception only serves to stop early. Nothing happens outside of
    the main thread, or where the process ignores interrupts or leaves them to the system.
    """

    current: Interrupts | None = None  # that of the running command; a process has one handler of the signal

    def __init__(self) -> None:
        self.seen = False
        self._previous: object = None

    def __enter__(self) -> Self:
        previous = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread() and callable(previous):
            self._previous = previous
            signal.signal(signal.SIGINT, self._note)
            Interrupts.current = self
        return self

    def __exit__(self, *_: object) -> None:
        if callable(self._previous):
            signal.signal(signal.SIGINT, self._previous)
            Interrupts.current = None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.seen = True
        if callable(self._previous):
            self._previous(number, frame)


def stop_if_interrupted() -> None:
    """Raise `KeyboardInterrupt` if the command was interrupted and the exception was lost; call it before writing."""
    if Interrupts.current is not None and Interrupts.current.seen:
        raise KeyboardInterrupt
