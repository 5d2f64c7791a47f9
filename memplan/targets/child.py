"""`asked_for`: asks a question of a GPU that is not there, in a child process in which torch believes that it is.

The child is a fork: it has the model as it is, without a copy, and what the stand-in changes ends with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

import torch

from memplan.core.gpus import GpuTarget
from memplan.errors import MemplanError, UnsupportedDevice
from memplan.targets.guard import built_guard

_T = TypeVar("_T")
_log = logging.getLogger("memplan")
_PR_SET_PDEATHSIG = 1  # of Linux


def asked_for(target: GpuTarget, question: Callable[[], _T]) -> _T:
    """Return the answer to a question that is asked where the target stands in for the GPU of the process.

    What it logs and warns of is logged and warned of here. It ends with this process, or when Ctrl-C stops this call.

    Args:
        target: The GPU.
        question: What traces and plans; its answer has no tensors.

    Raises:
        UnsupportedDevice: This process cannot be copied, or has run a backward on a machine with a device.
        MemplanError: What the question raises, and if its process ends without an answer.
    """
    require_child()
    from memplan.torch_inside.dynamo import compile_lock

    read, write = os.pipe()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    with compile_lock, warnings.catch_warnings():  # no other thread traces: the child would have its lock for ever
        warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of a fork beside threads
        child = os.fork()
        if child == 0:
            try:
                os.close(read)
                with os.fdopen(write, "wb") as results:
                    _answer(target, question, results)
            finally:  # whatever happens, it never goes on with what called this
                os._exit(0)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as results:
            found: _T = _received(results, child)
            return found
    finally:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):  # somebody else may have waited for it
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def require_child() -> None:
    """Raise `UnsupportedDevice` where no process can be copied, and `LibraryNotInstalled` if its guard is not built."""
    if not hasattr(os, "fork") or sys.platform == "darwin":
        hint = "plan on Linux, or in a container of it"
        raise UnsupportedDevice("planning for one needs a system that forks", where="target", hint=hint, see="target")
    built_guard()


def _answer(target: GpuTarget, question: Callable[[], Any], results: IO[bytes]) -> None:
    """Send the answer to a question, or the error that it raises, from the child."""
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent says that it was stopped
        signal.signal(number, signal.SIG_DFL)
    with contextlib.suppress(OSError, AttributeError):  # where it can, the system ends this process with its parent
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    def send(kind: str, what: Any) -> None:
        """Send a message whole; of what cannot be sent, the words."""
        try:
            content = pickle.dumps((kind, what))
            pickle.loads(content)
        except Exception as error:  # an object of the model's own
            content = pickle.dumps(_in_words(kind, what, error))
        results.write(content)
        results.flush()

    try:
        with _forwarded(send), torch.autograd.set_multithreading_enabled(False):
            torch.set_num_threads(1)  # the threads of the parent are not in a copy of it
            _require_backward()
            from memplan.targets.stand_in import stand_in

            notes = stand_in(target)
            answer = question()
            for note in sorted(notes):
                _log.warning("%s", note)
        send("answer", answer)
    except BaseException as error:
        send("error", error)


def _require_backward() -> None:
    """Raise `UnsupportedDevice` where autograd has had threads for a device: a copy of it can trace no backward."""
    try:
        with torch.inference_mode(False), torch.enable_grad():
            number = torch.zeros((), device="cpu", requires_grad=True)
            torch.autograd.grad(number * 2, number)
    except RuntimeError as error:
        if "fork" not in str(error):
            raise
        what = "this process has run a backward on a machine with a device, so a copy of it cannot trace another"
        hint = "plan in a process of its own, as `memplan report FILE.py:FACTORY --target ...` does, or before training"
        raise UnsupportedDevice(what, where="target", hint=hint, see="target") from error


def _in_words(kind: str, what: Any, error: Exception) -> tuple[str, Any]:
    """Return a message in the place of one that cannot be sent."""
    if kind == "log":
        return kind, logging.LogRecord(what.name, what.levelno, what.pathname, what.lineno, what.msg, (), None)
    if kind == "warning":
        return kind, (what[0], UserWarning, *what[2:])
    try:
        words = f"{type(what).__name__}: {what} ({error})"
    except Exception:  # its own text fails
        words = type(what).__name__
    return "error", RuntimeError(words)


@contextlib.contextmanager
def _forwarded(send: Callable[[str, Any], None]) -> Iterator[None]:
    """Send what is logged and warned of to the parent."""

    class Sending(logging.Handler):
        """Sends records, with their text."""

        def emit(self, record: logging.LogRecord) -> None:
            record.msg, record.args, record.exc_info = record.getMessage(), (), None
            send("log", record)

    handlers, propagate = _log.handlers[:], _log.propagate
    _log.handlers[:], _log.propagate = [Sending()], False
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            _log.handlers[:], _log.propagate = handlers, propagate
            for warning in caught:
                send("warning", (str(warning.message), warning.category, warning.filename, warning.lineno))


def _received(results: IO[bytes], child: int) -> Any:
    """Return the answer of the child; log and warn of what it did."""
    found: Any = None
    while True:
        try:
            kind, what = pickle.load(results)
        except (EOFError, pickle.UnpicklingError):  # it has ended, perhaps within a message
            break
        if kind == "log":
            _log.handle(what)
        elif kind == "warning":
            message, category, filename, lineno = what
            warnings.warn_explicit(message, category, filename, lineno)
        else:  # the last message: whoever else has the pipe open is not waited for
            found = kind, what
            break
    if found is None:
        hint = "see what it printed; it may have had too little memory"
        raise MemplanError(
            f"the process that plans ended without an answer ({_ended(child)})", where="target", hint=hint
        )
    if found[0] == "error":
        raise found[1]
    return found[1]


def _ended(child: int) -> str:
    """Return how the child ended."""
    try:
        info = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    except ChildProcessError:
        info = None
    if info is None:
        return "how is not known"
    return f"signal {info.si_status}" if info.si_code != os.CLD_EXITED else f"exit status {info.si_status}"
