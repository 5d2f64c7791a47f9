"""Fixtures of the command line's tests: run it, a saved plan, a CSV file; no terminal, an empty folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.cli import main
from tests.cli.helpers import CSV, Run
from tests.samples import sample_plan


@pytest.fixture(autouse=True)
def _plain(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No terminal, no colours, a folder of its own."""
    for name in ("COLUMNS", "LINES", "FORCE_COLOR", "TTY_COMPATIBLE", "TERMINAL_WIDTH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command line in this process: (exit code, stdout, stderr)."""

    def call(*args: object) -> tuple[int, str, str]:
        code = main([str(arg) for arg in args])
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    sample_plan().save(path)
    return path


@pytest.fixture
def csv_file(tmp_path: Path) -> Path:
    path = tmp_path / "buffers.csv"
    path.write_text(CSV)
    return path
