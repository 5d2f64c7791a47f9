"""Stages of long work: a line for each in a log, one changing line on a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from memplan.cli import console as module
from memplan.cli.console import stages


def test_a_log_has_a_line_for_each_stage_with_the_seconds_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("Planning net") as tell:
        tell("tracing")
        tell("planning")
    lines = [line.split("s  ") for line in capsys.readouterr().err.splitlines()]
    assert [said for _, said in lines] == ["Planning net: tracing", "Planning net: planning"]
    assert all(float(seconds) >= 0 for seconds, _ in lines)


def test_a_terminal_has_one_changing_line(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(module, "error_console", lambda: Console(file=shown, force_terminal=True, width=80))
    monkeypatch.setattr(module, "is_live", lambda screen: True)
    with stages("Planning [net]") as tell:
        tell("tracing")
    assert "Planning [net]: tracing" in shown.getvalue()
    assert shown.getvalue().endswith("\x1b[2K"), "and is gone afterwards"
