"""Runs a function for a limited time, in a process of its own because compiled searches cannot be interrupted."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from memplan.errors import MemplanError

T = TypeVar("T")


def within(seconds: float | None, function: Callable[..., T], *args: Any) -> T | None:
    """Return the result of `function(*args)`, or None when it takes longer than `seconds`.

    `seconds` is wall time, the start of the process included; None means no limit and no other process. Raises what
    the function raises, and `MemplanError` when its process ends without a result.
    """
    if seconds is None:
        return function(*args)
    context = multiprocessing.get_context("spawn")  # fork is not safe beside the threads of numerical libraries
    answers, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    child.start()
    sender.close()
    try:
        if not answers.poll(seconds):
            return None
        returned, answer = answers.recv()
    except EOFError:
        child.join()
        what = f"the process that proves again ended with exit code {child.exitcode}"
        raise MemplanError(what, hint="it may have run out of memory: try without --time-limit") from None
    finally:
        child.kill()
        child.join()
        child.close()
        answers.close()
    if not returned:
        raise answer
    found: T = answer
    return found


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt ends the parent, and the parent this process
    try:
        sender.send((True, function(*args)))
    except Exception as error:
        sender.send((False, error))
