"""Says what takes long: to the logger `memplan.time`, and in a terminal or notebook in a line that disappears."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from memplan.errors import UnknownName

if TYPE_CHECKING:
    from rich.console import Console

LONG = 1.0  # seconds: of work that takes less, no time is logged

_log = logging.getLogger("memplan.time")  # apart, so that it can be silenced alone
_shown: ContextVar[bool] = ContextVar("shown", default=False)  # a line in the terminal; there is one at a time


@contextmanager
def timed(doing: str) -> Iterator[None]:
    """Log at INFO, as "memplan.time", that work begins, and how long it took if that is over `LONG` seconds.

    It is logged whether or not the work succeeds. A terminal or notebook shows it meanwhile, unless it shows that log.
    """
    _log.info("%s ...", doing)
    began = time.perf_counter()
    silent = _shown.get() or _log.isEnabledFor(logging.INFO) or not _is_live()
    try:
        with nullcontext() if silent else live_line(doing):
            yield
    finally:
        seconds = time.perf_counter() - began
        if seconds > LONG:
            _log.info("%s took %.1f s", doing, seconds)


def _is_live() -> bool:
    """Return whether a line can disappear again: in a terminal, or in a notebook that has widgets."""
    if "ipykernel" in sys.modules and find_spec("ipywidgets") is not None:
        return True
    try:  # what stands for the standard error may not know
        return sys.stderr.isatty()
    except (AttributeError, ValueError):
        return False


@contextmanager
def live_line(doing: str, screen: Console | None = None) -> Iterator[Callable[[str], object]]:
    """Show work in a line of a terminal or notebook, with its seconds, and yield a function that shows its stage.

    Args:
        doing: The work.
        screen: The terminal; None: that of the standard error.
    """
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    parts = SpinnerColumn("line"), TimeElapsedColumn(), TextColumn("{task.description}", markup=False)
    token = _shown.set(True)
    try:
        with Progress(*parts, console=screen or Console(stderr=True), transient=True) as shown:
            task = shown.add_task(f"{doing} ...", total=None)
            yield lambda stage: shown.update(task, description=f"{doing}: {stage}")
    finally:
        _shown.reset(token)


class _Printing(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler of `set_log_level`."""


def set_log_level(level: str | int | None) -> None:
    """Print what the logger `memplan` says to the standard error.

    The environment variable `MEMPLAN_LOG` does so from the start.

    Args:
        level: What is printed: "debug", "info" (each stage before it begins, and how long it took), "warning" or
            "error", or a number of Python's; None: only what Python's own settings of the logger say.

    Raises:
        UnknownName: There is no such level.

    Example:
        >>> memplan.set_log_level("info")
    """
    log = logging.getLogger("memplan")
    number: Any = logging.getLevelNamesMapping().get(str(level or "NOTSET").upper(), level)
    if not isinstance(number, int) or level == "":
        raise UnknownName(
            "is no level", where=f"log level {level!r}", hint='give "debug", "info", "warning" or "error"'
        )
    log.handlers[:] = [handler for handler in log.handlers if not isinstance(handler, _Printing)]
    log.setLevel(number)
    log.propagate = level is None
    if level is not None:
        handler = _Printing()
        handler.setFormatter(logging.Formatter("memplan %(asctime)s %(levelname)s: %(message)s", "%H:%M:%S"))
        log.addHandler(handler)
