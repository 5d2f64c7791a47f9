"""`memplan report` on saved plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.planning import planfile
from tests.cli.helpers import Run
from tests.samples import sample_plan


def test_report_shows_a_saved_plan(run: Run, plan_file: Path) -> None:
    code, out, err = run("report", plan_file)
    assert (code, err) == (0, "")
    for text in ("sample", "peak (max live)", "arena", "beside the arena", "h.0.attn", "model.py:12"):
        assert text in out


def test_report_writes_the_plan(run: Run, plan_file: Path, tmp_path: Path) -> None:
    code, out, _ = run("report", plan_file, "--save", "copy.json", "--format", "markdown")
    assert code == 0
    assert out.startswith("## sample")
    assert planfile.load(tmp_path / "copy.json") == sample_plan()


def test_report_prints_json(run: Run, plan_file: Path) -> None:
    code, out, _ = run("report", plan_file, "--format", "json")
    assert code == 0
    figures = json.loads(out)
    assert (figures["total"], figures["arena_size"]) == (sample_plan().total, 320)


def test_report_for_github(run: Run, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = run("report", plan_file, "--format", "github")
    assert code == 0
    assert "::notice title=memplan" not in out
    assert (
        "::notice title=sample%3A forward + backward%2C 5 steps%2C 3 buffers::This step needs 768 B with AdamW" in out
    )
    assert (tmp_path / "summary.md").read_text().startswith("## sample")
