"""`--target`: reports and checks of plans for a GPU that is not here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import memplan
from memplan.core.gpus import GPUS
from tests.cli.helpers import Run

MODEL = """
import torch

def make():
    layers = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 8))
    return layers, torch.randn(32, 64)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A model in the working directory."""
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    return "model.py:make"


def test_a_report_is_of_the_gpu(run: Run, model: str) -> None:
    code, out, _ = run("report", model, "--target", "h100", "--format", "json")
    assert code == 0
    figures = json.loads(out)
    assert figures["total"] > 50_000_000  # with the workspaces of cuBLAS
    code, out, _ = run("report", model, "--target", "h100")
    assert "NVIDIA H100" in out


@pytest.mark.parametrize("command", [("report",), ("budget",), ("explain",), ("diff", "plan.json")])
def test_an_unknown_gpu_and_one_for_a_saved_plan_are_refused(
    run: Run, model: str, plan_file: Path, command: tuple[str, ...]
) -> None:
    code, _, err = run(*command, model, "--target", "h1000")
    assert code == 2
    assert "did you mean 'h100'" in err
    code, _, err = run(*command, plan_file, "--target", "h100")
    assert code == 2
    assert "is a saved plan" in err


def test_budgets_steps_and_differences_are_of_the_gpu(run: Run, model: str, tmp_path: Path) -> None:
    assert run("report", model, "--target", "l40s", "--save", "there.json")[0] == 0
    workspace, explained = GPUS["l40s"].workspace, list[str]()
    for target in ((model, "--target", "l40s"), ("there.json",)):
        found = json.loads(run("budget", *target, "--format", "json")[1])
        assert found["costs"] == "l40s"
        bare = json.loads(run("budget", *target, "--optimizer", "none", "--format", "json")[1])
        more = json.loads(run("budget", *target, "--reserve", "1MiB", "--format", "json")[1])
        assert more["most"] - bare["most"] == 1 << 20
        assert found["most"] > workspace
        explained.append(run("explain", *target, "--at", "0")[1])
    assert explained[0] == explained[1] != ""
    assert memplan.load(tmp_path / "there.json").alignment == 512
    assert "16.21 MiB" in run("diff", model, "there.json")[1]
    for pair in ((model, "there.json"), ("there.json", model), (model, model)):
        code, out, _ = run("diff", *pair, "--target", "l40s")
        assert (code, "the plans are the same" in out) == (0, True), out


def test_a_check_of_a_gpus_plan_has_a_baseline_of_its_own(run: Run, model: str, tmp_path: Path) -> None:
    baseline = tmp_path / "memory.json"
    assert run("check", model, "--target", "a100", "--baseline", baseline, "--update-baseline")[0] == 0
    assert list(json.loads(baseline.read_text())["models"]) == ["model.py:make on a100"]
    assert run("check", model, "--target", "a100", "--baseline", baseline)[0] == 0
    (tmp_path / "model.py").write_text(MODEL.replace("256", "512"), encoding="utf-8")
    code, out, _ = run("check", model, "--target", "a100", "--baseline", baseline)
    assert code == 1
    assert "on a100" in out


def test_a_project_names_the_gpu_of_a_model(run: Run, model: str, tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        f'[tool.memplan]\nmodels = ["{model}", {{ target = "{model}", gpu = "l4" }}]\nfail-over = ["arena:1MiB"]\n',
        encoding="utf-8",
    )
    code, out, _ = run("check")
    assert code == 0
    assert "model.py:make on l4" in out
    code, _, err = run("check", "--target", "l4")
    assert code == 2
    assert "named on the command line" in err
