"""Keeps what tracing says about its own internals from the user, in the thread that traces alone."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress this thread's warnings and logs, which are noise to a user of memplan; other threads keep theirs."""
    silence = _Silence()
    handlers = _handlers()
    for handler in handlers:
        handler.addFilter(silence)
    every: Any = ("ignore", silence, Warning, None, 0)
    filters: Any = warnings.filters
    filters.insert(0, every)
    try:
        yield
    finally:
        silence.active = False  # another thread may have a copy of the filters
        for handler in handlers:
            handler.removeFilter(silence)
        if every in warnings.filters:
            filters = warnings.filters
            filters.remove(every)


class _Silence(logging.Filter):
    """Drops what is logged by the thread that made it; `match` makes it the pattern of a filter of warnings too."""

    def __init__(self) -> None:
        super().__init__()
        self.active = True
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is shown."""
        return not (self.active and record.thread == self._thread)

    def match(self, text: str) -> bool:
        """Return whether a warning that is raised now is ignored."""
        return self.active and threading.get_ident() == self._thread


def _handlers() -> set[logging.Handler]:
    """Return the handlers of all loggers."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    found = {handler for logger in loggers if isinstance(logger, logging.Logger) for handler in logger.handlers}
    return found | ({logging.lastResort} if logging.lastResort is not None else set())
