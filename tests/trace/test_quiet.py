"""Tracing keeps what it says about its own internals from the thread that traces, and from no other."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest

from memplan.trace.capture.front_ends import quiet


def test_one_thread_is_silent_while_another_one_is_heard(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("torch.some_internal")

    def say(words: str) -> None:
        log.warning(words)
        warnings.warn(words, stacklevel=1)

    other = threading.Thread(target=say, args=("of another thread",))
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        with quiet():
            say("of the tracing thread")
            other.start()
            other.join()
        say("afterwards")
    assert [record.message for record in caplog.records] == ["of another thread", "afterwards"]
    assert [str(one.message) for one in raised] == ["of another thread", "afterwards"]


def test_threads_that_overlap_leave_everything_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    before = (logging.root.manager.disable, list(warnings.filters), [list(h.filters) for h in logging.root.handlers])
    entered, left = threading.Event(), threading.Event()

    def second() -> None:
        with quiet():
            entered.set()
            left.wait(10)

    thread = threading.Thread(target=second)
    with quiet():
        thread.start()
        assert entered.wait(10)
    left.set()  # the one that came later leaves later
    thread.join()
    after = (logging.root.manager.disable, list(warnings.filters), [list(h.filters) for h in logging.root.handlers])
    assert after == before
    logging.getLogger("torch.some_internal").warning("afterwards")
    assert caplog.messages == ["afterwards"]
