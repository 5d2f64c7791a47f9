"""Shows the stages of long work: one changing line on a terminal, a line for each in a log."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from memplan.cli.console import error_console, is_live

QUIET_SECONDS = 10.0  # after which a log has another line of a stage that is still going on
_TICK = 1.0  # the same on a terminal
_THREAD = "memplan stages"


@dataclass(slots=True)
class _Stages:
    """The stage that is going on. The working thread sets it, and another one shows it again."""

    doing: str
    show: Callable[[str], object]
    again: str = "still "  # before a stage that is shown again
    began: float = field(default_factory=time.perf_counter)
    stage: str = ""
    news: threading.Event = field(default_factory=threading.Event)
    over: bool = False

    def __call__(self, stage: str) -> None:
        """Show that a stage begins."""
        self.stage = stage
        self.show(self._line(stage))
        self.news.set()

    def watch(self, seconds: float) -> None:
        """Show the stage again whenever there is nothing new for so many seconds, until it is over."""
        while not self.over:
            if self.news.wait(seconds):
                self.news.clear()
            elif self.stage:
                self.show(self._line(self.again + self.stage))

    def _line(self, stage: str) -> str:
        return f"{time.perf_counter() - self.began:6.1f} s  {self.doing}: {stage}"


@contextlib.contextmanager
def stages(doing: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a stage, with the seconds since the work began, on stderr.

    What takes long is shown again, with its seconds.
    """
    from rich.text import Text

    screen = error_console()
    if not is_live(screen):
        with _watched(_Stages(doing, lambda line: screen.print(Text(line), soft_wrap=True)), QUIET_SECONDS) as tell:
            yield tell
        return
    with (
        screen.status(Text(f"{doing} ..."), spinner="line") as status,
        _watched(_Stages(doing, lambda line: status.update(Text(line)), again=""), _TICK) as tell,
    ):
        yield tell


@contextlib.contextmanager
def _watched(told: _Stages, seconds: float) -> Iterator[Callable[[str], None]]:
    thread = threading.Thread(target=told.watch, args=(seconds,), name=_THREAD, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        told.over = True
        told.news.set()
        thread.join()
