"""Ctrl-C: every command ends with 130, writes nothing, and hears of it wherever it is."""

from __future__ import annotations

import contextlib
import importlib
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.core.files import write_atomic
from tests.cli.helpers import Run


def _interrupted(*_: object, **__: object) -> Any:
    signal.raise_signal(signal.SIGINT)
    raise AssertionError("an interrupt raises")


def _wrapped(*_: object, **__: object) -> Any:
    """What a compiled kernel makes of an interrupt while it returns its results."""
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt as error:
        raise SystemError("CPUDispatcher returned a result with an exception set") from error


def _dropped(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call` during which an interrupt is lost, as in a callback that cannot raise."""

    def instead(*args: object, **kwargs: object) -> Any:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        return call(*args, **kwargs)

    return instead


@pytest.fixture
def folder(tmp_path: Path, plan_file: Path, csv_file: Path) -> Path:
    """plan.json and buffers.csv, and nothing else."""
    return tmp_path


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _replace(monkeypatch: pytest.MonkeyPatch, name: str, how: Callable[[Any], Any]) -> None:
    """Put `how(what is there)` where `name` is."""
    module, _, attribute = name.rpartition(".")
    at = importlib.import_module(module)
    monkeypatch.setattr(at, attribute, how(getattr(at, attribute)))


COMMANDS = [
    (["report", "plan.json", "--html", "out.html", "--save", "out.json"], "memplan.planning.planfile.load"),
    (["budget", "plan.json", "--html", "out.html"], "memplan.planning.frontier.frontier"),
    (["check", "plan.json", "--baseline", "out.json", "--update-baseline"], "memplan.planning.planfile.load"),
    (["solve", "buffers.csv", "-o", "out.csv", "--plot", "out.svg"], "memplan.solvers.solve"),
    (["diff", "plan.json", "plan.json", "--html", "out.html"], "memplan.report.pages.diff_html"),
    (["budget", "plan.json", "--html", "out.html"], "memplan.report.pages.frontier_html"),
    (["explain", "plan.json"], "memplan.planning.planfile.load"),
    (["demo", "-o", "shown"], "memplan.cli.source.load_model"),
    (["doctor"], "memplan.cli.doctor._system"),
]


@pytest.mark.parametrize("how", [_interrupted, _wrapped])
@pytest.mark.parametrize("command", COMMANDS, ids=[args[0] for args, _ in COMMANDS])
def test_every_command_ends_with_130_and_writes_nothing(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[list[str], str], how: Callable[..., Any]
) -> None:
    (args, during), before = command, _contents(folder)
    _replace(monkeypatch, during, lambda _: how)
    code, out, err = run(*args)
    assert code == 130
    assert "bug" not in out + err
    assert _contents(folder) == before


@pytest.mark.parametrize("command", COMMANDS[:6], ids=[args[0] for args, _ in COMMANDS[:6]])
def test_a_lost_interrupt_still_keeps_a_command_from_writing(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[list[str], str]
) -> None:
    (args, during), before = command, _contents(folder)
    _replace(monkeypatch, during, _dropped)
    assert run(*args)[0] == 130
    assert _contents(folder) == before


def test_the_handler_is_only_there_while_a_command_runs(run: Run, plan_file: Path) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: seen.append(number))
    try:
        mine = signal.getsignal(signal.SIGINT)
        assert run("explain", plan_file)[0] == 0
        assert signal.getsignal(signal.SIGINT) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as for a command that a script runs in the background
        assert main(["--version"]) == 0
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert not seen


def test_an_interrupt_while_a_file_is_written_leaves_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("old")
    write = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        write(path, data[: len(data) // 2])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", half)
    with pytest.raises(KeyboardInterrupt):
        write_atomic(tmp_path / "file", "new and long")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]
