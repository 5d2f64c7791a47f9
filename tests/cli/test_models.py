"""Models named on a command line: what a factory may return, what goes wrong in the user's code, one real model."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from memplan.cli import main
from memplan.cli.source import load_model, names_model
from memplan.core.plan import Plan
from memplan.errors import InvalidModel, UnsupportedGraph
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


SOURCE = """\
def model(*args, **kwargs):
    return args, kwargs

def pair(): return model, (1, 2)
def listed(): return [model, [1, 2]]
def single(): return model, 3
def keywords(): return model, {"x": 1}
def triple(): return model, (1,), {"x": 2}
def leaves(): raise SystemExit("bye")
def none(): pass
def number(): return 3
def four(): return 1, 2, 3, 4
def no_model(): return "model", ()
def bad_keywords(): return model, (), {1: 2}
def wants(argument): return model, ()
value = 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model_file.py; sys.path and sys.modules are as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_file.py").write_text(SOURCE)
    return tmp_path


@pytest.mark.parametrize("target", ["", "a.py", "plan.json", "a.py:", ":f", "a.py:f()", "a.py:1", "a.py:f g"])
def test_what_names_no_model(target: str) -> None:
    assert not names_model(target)
    with pytest.raises(InvalidModel, match=r"FILE\.py:FACTORY"):
        load_model(target)


@pytest.mark.parametrize(
    ("factory", "args", "kwargs"),
    [
        ("pair", (1, 2), {}),
        ("listed", ([1, 2],), {}),
        ("single", (3,), {}),
        ("keywords", (), {"x": 1}),
        ("triple", (1,), {"x": 2}),
    ],
)
@pytest.mark.parametrize("source", ["model_file.py", "./model_file.py", "model_file", "{folder}/model_file.py"])
def test_what_a_factory_may_return(
    folder: Path, source: str, factory: str, args: tuple[Any, ...], kwargs: dict[str, int]
) -> None:
    named = load_model(f"{source.format(folder=folder)}:{factory}")
    assert named.model(*named.args, **named.kwargs) == (args, kwargs)
    assert Path(named.file).resolve() == folder / "model_file.py"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("none", "returned None"),
        ("number", "returned an object of type int"),
        ("four", "returned an object of type tuple of 4 items"),
        ("no_model", "returned an object of type str as the model"),
        ("bad_keywords", "as keyword arguments"),
        ("wants", "wants: needs arguments: missing a required argument: 'argument'"),
        ("value", "value: is not a function(.|\n)*it has model, pair"),
        ("missing", "missing: there is no such name(.|\n)*it has model, pair"),
        ("leaves", r"model_file\.py:9: leaves\(\) failed: SystemExit: bye"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(folder: Path, factory: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        load_model(f"model_file.py:{factory}")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", r"broken\.py:1: cannot be imported: SyntaxError"),
        ("x = 1\nraise RuntimeError('at import')\n", r"broken\.py:2: cannot be imported: RuntimeError: at import"),
        ("import sys\nsys.exit()\n", r"broken\.py:2: cannot be imported: SystemExit"),
        ("import no_such_module_at_all\n", r"broken\.py:1: cannot be imported: ModuleNotFoundError"),
        ("x = '\x00'\n", r"broken.*: cannot be imported: (SyntaxError|ValueError)"),
    ],
)
def test_a_file_that_cannot_be_imported(folder: Path, source: str, message: str) -> None:
    (folder / "broken.py").write_text(source)
    for target in ("broken.py:f", "broken:f"):
        with pytest.raises(InvalidModel, match=message):
            load_model(target)
    assert not [name for name in sys.modules if name.startswith("_memplan_broken")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py:f", "nothing.py: there is no such file"),
        ("no_such_package.inner:f", "there is no module 'no_such_package'"),
        ("xml.no_such_part:f", r"there is no module 'xml\.no_such_part'"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, target: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        load_model(target)
