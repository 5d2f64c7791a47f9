"""Models on the command line: a stand-in traces, so that these are tests of the command line; one real model."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.core.plan import Plan
from memplan.errors import UnsupportedGraph
from memplan.planning import planfile
from memplan.planning.options import PlanOptions
from tests.cli.helpers import Run
from tests.samples import sample_plan


class FakeTracer(types.ModuleType):
    """Stands in for `memplan.trace`: remembers how it was called, returns the sample plan or raises."""

    def __init__(self) -> None:
        super().__init__("memplan.trace")
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.error: Exception | None = None

    def plan(self, model: Any, *args: Any, **options: Any) -> Plan:
        self.calls.append((args, options))
        print("noise of the tracer")
        model()
        if self.error is not None:
            raise self.error
        return sample_plan()


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeTracer:
    fake = FakeTracer()
    monkeypatch.setitem(sys.modules, "memplan.trace", fake)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "model.py").write_text(
        "print('noise of the file')\n"
        "def run(): print('noise of the model')\n"
        "def make(): return run, (1, 2)\n"
        "def failing():\n"
        "    def forward():\n"
        "        raise KeyError('inside the model')\n"
        "    return forward, ()\n"
        "def broken(): raise ValueError('inside the factory')\n"
    )
    return fake


def test_report_plans_a_model(run: Run, tracer: FakeTracer) -> None:
    code, out, err = run("report", "model.py:make")
    assert code == 0
    assert out.startswith("model.py:make: forward + backward")
    assert "noise" not in out
    assert "noise of the model" in err
    ((args, options),) = tracer.calls
    assert args == ((1, 2), None)
    assert options == {"train": None, "options": PlanOptions(), "ranks": None}


def test_report_passes_its_options_on(run: Run, tracer: FakeTracer) -> None:
    options = ["--infer", "--solver", "naive", "--time-limit", "2", "--budget", "50%", "--costs", "h100"]
    assert run("report", "model.py:make", *options)[0] == 0
    assert run("report", "model.py:make", "--gradients", "arena")[0] == 0
    passed = PlanOptions(budget="50%", costs="h100", solver="naive", time_limit=2.0)
    assert tracer.calls[0][1] == {"train": False, "options": passed, "ranks": None}
    assert tracer.calls[1][1] == {"train": None, "options": PlanOptions(gradients="arena"), "ranks": None}


def test_check_plans_models_and_loads_plans(run: Run, tracer: FakeTracer, plan_file: Path) -> None:
    renamed = plan_file.rename(plan_file.with_name("odd:name"))
    assert run("check", "model.py:make", renamed, "--max-arena", "1KiB", "--infer")[0] == 0
    assert tracer.calls[0][1]["train"] is False


@pytest.mark.parametrize(
    ("target", "messages"),
    [
        ("model.py:failing", ["model.py:6: planning failed: KeyError: 'inside the model'", "> raise KeyError"]),
        ("model.py:broken", ["model.py:8: broken() failed: ValueError: inside the factory"]),
        ("model.py:absent", ["there is no such name", "make"]),
    ],
)
def test_errors_of_the_users_code_are_bad_input(run: Run, tracer: FakeTracer, target: str, messages: list[str]) -> None:
    code, out, err = run("report", target)
    assert (code, out) == (2, "")
    for message in messages:
        assert message in err


def test_a_graph_that_cannot_be_planned_is_bad_input_without_noise(run: Run, tracer: FakeTracer) -> None:
    tracer.error = UnsupportedGraph("layer.3", "depends on data", "use torch.where")
    code, out, err = run("report", "model.py:make")
    assert (code, out) == (2, "")
    assert err.splitlines()[1:] == ["error: layer.3: depends on data", "  next step: use torch.where"]


def test_traceback_shows_where_an_error_came_up(tracer: FakeTracer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--traceback", "report", "model.py:failing"]) == 2
    assert "in forward" in capsys.readouterr().err


def test_a_bug_of_ours_is_called_one(
    plan_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(plan: Plan) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("memplan.report.summary.make_report", broken)
    assert main(["report", str(plan_file)]) == 3
    assert "this is a bug in memplan" in capsys.readouterr().err


NET = """\
import torch
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(8, 64), torch.nn.Linear(64, 1)
    def forward(self, x):
        return self.last(torch.relu(self.first(x))).sum()
def net(): return Net(), (torch.ones(16, 8),)
"""


def test_a_real_model_is_planned(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "real.py").write_text(NET)
    assert run("report", "real.py:net", "--save", "real.json")[0] == 0
    plan = planfile.load(tmp_path / "real.json")
    assert plan.outside["parameters"] == 4 * (8 * 64 + 64 + 64 + 1)
    assert run("check", "real.json", "--max-arena", f"{plan.arena_size}B")[0] == 0
    assert run("report", "real.py:net", "--infer")[1].startswith("real.py:net: forward only")
