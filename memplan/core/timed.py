"""Logs work that takes long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

LONG = 1.0  # seconds: work that takes less is not logged

_log = logging.getLogger("memplan.time")  # apart, so that it can be silenced alone


@contextmanager
def timed(doing: str) -> Iterator[None]:
    """Log at INFO, as "memplan.time", how long the work inside took if that is over `LONG` seconds.

    It is logged whether or not the work succeeds.
    """
    began = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - began
        if seconds > LONG:
            _log.info("%s took %.1f s", doing, seconds)
