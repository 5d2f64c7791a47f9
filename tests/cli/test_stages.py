"""Stages of long work, shown again while they go on."""

from __future__ import annotations

import io
import threading

import pytest
from rich.console import Console

from memplan.cli import stages as module
from memplan.cli.stages import stages


class Lines(io.StringIO):
    """A log that says when a text was written."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.seen = text, threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if self.text in self.getvalue():
            self.seen.set()
        return written


@pytest.mark.parametrize("terminal", [False, True])
def test_a_stage_that_goes_on_is_shown_again(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    log = Lines("Planning net: tracing" if terminal else "Planning net: still tracing")
    screen = Console(file=log, force_terminal=terminal, width=80)
    monkeypatch.setattr(module, "error_console", lambda: screen)
    monkeypatch.setattr(module, "is_live", lambda screen: terminal)
    monkeypatch.setattr(module, "QUIET_SECONDS", 0.01)
    monkeypatch.setattr(module, "_TICK", 0.01)
    with stages("Planning net") as tell:
        tell("tracing")
        assert log.seen.wait(30)
    assert ("still" in log.getvalue()) != terminal
    assert all(thread.name != module._THREAD for thread in threading.enumerate())


def test_a_stage_that_is_short_has_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    log = Lines("")
    monkeypatch.setattr(module, "error_console", lambda: Console(file=log, width=80))
    with stages("Planning net") as tell:
        tell("tracing")
        tell("planning")
    assert [line.split("  ")[-1] for line in log.getvalue().splitlines()] == [
        "Planning net: tracing",
        "Planning net: planning",
    ]
