"""Work that takes long is logged, and nothing else."""

from __future__ import annotations

import contextlib
import logging

import pytest

from memplan.core.timed import timed


def test_long_work_is_logged_whether_or_not_it_succeeds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="memplan")
    with timed("a moment"):
        pass
    assert caplog.messages == []
    monkeypatch.setattr("memplan.core.timed.LONG", 0.0)
    with contextlib.suppress(ValueError), timed("tracing"):
        raise ValueError
    assert caplog.messages == ["tracing took 0.0 s"]
    assert caplog.records[0].levelno == logging.INFO
