"""The benchmark of real sizes on a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import memplan
from benchmarks import frontier_picture
from benchmarks.gpu import main, to_markdown

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results" / "gpu.json"


def test_the_tables_of_the_docs_are_those_of_the_results() -> None:
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    page = (RESULTS.parents[2] / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    readme = (RESULTS.parents[2] / "README.md").read_text(encoding="utf-8")
    rows = [row for run in results["runs"] for of in run["models"] for row in of["rows"] if row.get("ms")]
    for row in rows:
        if row["contender"] in ("memplan", "step"):
            said = f"{row['alloc']:.2f} GB"
            assert said in page
            assert said in readme
    for run in results["runs"]:
        assert "| eager |" in to_markdown({**results, "models": run["models"]}) or run is not results["runs"][0]


@pytest.mark.slow
def test_a_rehearsal_measures_each_contender_and_names_the_one_that_fails(tmp_path: Path) -> None:
    output, dump = tmp_path / "gpu.json", tmp_path / "plans"
    asked = ["--models", "gpt2", "--contenders", "eager,memplan,step,memplan+zzz", "--tiny", "--device", "cpu"]
    asked += ["--parallel", "2", "--rounds", "2", "--steps", "2", "--ready", "500"]
    assert main([*asked, "--output", str(output), "--dump", str(dump)]) == 1
    (of,) = json.loads(output.read_text(encoding="utf-8"))["models"]
    rows = {row["contender"]: row for row in of["rows"]}
    assert "no option 'zzz'" in rows.pop("memplan+zzz")["error"]
    assert all(len(row["all_ms"]) == 2 for row in rows.values())
    assert rows["memplan"]["kernels"] == "aten"
    assert memplan.load(dump / "gpt2-step.json").total == pytest.approx(rows["step"]["planned"] * 1e9)
    losses = [row["losses"] for row in rows.values()]
    torch.testing.assert_close(torch.tensor(losses[0][:2]), torch.tensor(losses[1][:2]), rtol=1e-3, atol=1e-3)
    assert "| eager |" in output.with_suffix(".md").read_text(encoding="utf-8")


def test_what_was_predicted_is_within_five_points_of_what_was_measured() -> None:
    """But for the whole step, which the host bounds; the docs have the table, and a picture of all points."""
    rows = json.loads(RESULTS.with_name("predicted.json").read_text(encoding="utf-8"))
    page = (RESULTS.parents[2] / "docs" / "guides" / "gpu.md").read_text(encoding="utf-8")
    budgeted = [row for row in rows if row.get("measured")]
    assert len(budgeted) == 5
    for row in budgeted:
        assert f"{100 * row['measured']:.1f} % | {100 * row['predicted']:.1f} %" in page
        assert abs(row["points"]) <= (8 if row["contender"].startswith("step") else 5)
    assert frontier_picture.PICTURE.read_text(encoding="utf-8") == frontier_picture.picture()
    measured = json.loads(RESULTS.read_text(encoding="utf-8"))
    points = frontier_picture.points_of("gpt2", measured, rows)
    assert {(p.whose, p.planned) for p in points} == {("memplan", False), ("torch", False)}
    assert sum(p.planned for p in frontier_picture.points_of("llama1b", measured, rows)) == 3
