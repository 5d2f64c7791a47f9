"""Handles Ctrl-C reliably, even where the `KeyboardInterrupt` is lost.

Compiled kernels and libraries that call back into Python turn a `KeyboardInterrupt` into errors of their own, or drop
it. Therefore the signal itself is recorded, and the exception only serves to stop early.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Self

EXIT_CODE = 130  # 128 + SIGINT, as shells report it


class Interrupts:
    """A context that records interrupts and passes them on to the previous handler.

    It does nothing outside of the main thread, or where the process ignores interrupts or leaves them to the system.
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
