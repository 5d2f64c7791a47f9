"""Shows the progress of a running solver: one changing line on a terminal, several lines in a log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from memplan.cli.console import error_console, is_live

if TYPE_CHECKING:
    from rich.console import Console

    from memplan.solvers import Progress

LINE_SECONDS = 1.0  # the shortest time between two lines in a log
Listener = Callable[["Progress"], None]


@dataclass(slots=True)
class _ProgressLine:
    """The latest progress; the solver's thread calls it, another thread reads it."""

    doing: str
    began: float = field(default_factory=time.perf_counter)
    latest: Progress | None = None

    def __call__(self, news: Progress) -> None:
        self.latest = news

    def line(self) -> str:
        """Return the line to show: seconds so far, the best arena, the bound and their gap."""
        from memplan.core.units import format_exact, format_share

        text = f"{self.doing} ... {time.perf_counter() - self.began:.1f} s"
        if self.latest is None or self.latest.incumbent is None:
            return text
        arena, bound = self.latest.incumbent, self.latest.bound
        apart = format_share(arena / bound - 1) if bound else "-"
        return f"{text}: arena {format_exact(arena)}, bound {format_exact(bound)}, gap {apart}"


@contextlib.contextmanager
def solver_progress(doing: str, *, wanted: bool | None) -> Iterator[Listener | None]:
    """Yield the function that a solver calls with its progress, or None if nothing is shown.

    `wanted` None: show progress on a terminal only; False: never.
    """
    screen = error_console()
    if wanted is False or (wanted is None and not is_live(screen)):
        yield None
        return
    watch = _ProgressLine(doing)
    with _on_terminal(watch, screen) if is_live(screen) else _in_log(watch, screen):
        yield watch


@contextlib.contextmanager
def _on_terminal(watch: _ProgressLine, screen: Console) -> Iterator[None]:
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    spinner = Spinner("line")

    def frame() -> Spinner:
        spinner.update(text=Text(watch.line(), no_wrap=True, overflow="ellipsis"))
        return spinner

    with Live(get_renderable=frame, console=screen, transient=True, refresh_per_second=8):
        yield


@contextlib.contextmanager
def _in_log(watch: _ProgressLine, screen: Console) -> Iterator[None]:
    """Print a line when there is progress, at most one every `LINE_SECONDS`, and always the last one."""
    shown: list[Progress | None] = [None]
    over = threading.Event()

    def tell() -> None:
        if watch.latest is not shown[0]:
            shown[0] = watch.latest
            screen.print(watch.line(), markup=False, soft_wrap=True)

    def run() -> None:
        while not over.wait(LINE_SECONDS):
            tell()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        tell()
