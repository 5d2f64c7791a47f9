"""Tests that long work says so before it begins and afterwards, to those who ask for it."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from typing import Any

import pytest

import memplan
from memplan.core.timed import timed
from memplan.errors import UnknownName


def test_work_is_logged_before_it_begins_and_its_time_whether_or_not_it_succeeds(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="memplan")
    with timed("a moment"):
        assert caplog.messages == ["a moment ..."]
    assert caplog.messages == ["a moment ..."]
    monkeypatch.setattr("memplan.core.timed.LONG", 0.0)
    with contextlib.suppress(ValueError), timed("tracing"):
        raise ValueError
    assert caplog.messages[1:] == ["tracing ...", "tracing took 0.0 s"]
    assert {record.levelno for record in caplog.records} == {logging.INFO}


@pytest.mark.parametrize("level", ["info", "debug"])
def test_the_level_of_the_log_is_set_and_taken_back(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        for _ in range(2):  # nothing is printed twice
            memplan.set_log_level(level)
        with timed("tracing"):
            pass
        assert capsys.readouterr().err.count("tracing ...") == 1
        memplan.set_log_level("warning")
        with timed("tracing"):
            pass
    finally:
        memplan.set_log_level(None)
    with timed("tracing"):
        pass
    assert not capsys.readouterr().err
    assert logging.getLogger("memplan").propagate


@pytest.mark.parametrize("level", ["loud", "", 1.5])
def test_a_level_that_there_is_not_is_refused(level: Any) -> None:
    with pytest.raises(UnknownName, match="info"):
        memplan.set_log_level(level)


def test_an_import_does_not_fail_for_a_level() -> None:
    run = [sys.executable, "-c", "import memplan"]
    found = subprocess.run(run, env={**os.environ, "MEMPLAN_LOG": "loud"}, capture_output=True, text=True, check=True)
    assert "MEMPLAN_LOG is ignored" in found.stderr


@pytest.mark.parametrize(("kernel", "widgets"), [(True, True), (True, False), (False, True)])
def test_a_notebook_with_widgets_shows_a_line_while_work_goes_on(
    kernel: bool, widgets: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []

    def line(doing: str) -> contextlib.AbstractContextManager[None]:
        shown.append(doing)
        return contextlib.nullcontext()

    monkeypatch.setattr("memplan.core.timed.live_line", line)
    monkeypatch.setattr("memplan.core.timed.find_spec", lambda name: name if widgets else None)
    monkeypatch.setattr("sys.modules", {**sys.modules, **({"ipykernel": sys} if kernel else {})})
    with timed("tracing"):
        pass
    assert shown == (["tracing"] if kernel and widgets else [])
