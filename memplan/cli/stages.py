"""Shows the stages of long work: one changing line on a terminal, a line for each in a log."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from memplan.cli.console import error_console, is_live


@contextlib.contextmanager
def stages(doing: str) -> Iterator[Callable[[str], None]]:
    """Yield a function that shows a stage, with the seconds since the work began, on stderr."""
    from rich.text import Text

    screen, began = error_console(), time.perf_counter()

    def line(stage: str) -> str:
        return f"{time.perf_counter() - began:6.1f} s  {doing}: {stage}"

    if not is_live(screen):
        yield lambda stage: screen.print(Text(line(stage)), soft_wrap=True)
        return
    with screen.status(Text(f"{doing} ..."), spinner="line") as status:
        yield lambda stage: status.update(Text(line(stage)))
