"""The command line: exit codes, what is printed where, and that bad input never shows a traceback."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memplan import planfile
from memplan.cli import main
from memplan.errors import UnsupportedGraph
from memplan.plan import Plan
from tests.samples import sample_plan

Run = Callable[..., tuple[int, str, str]]

CSV = "id,lower,upper,size\na,0,4,16\nb,2,6,16\nc,4,8,32\n"


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


def _python(code: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [sys.executable, "-c", code, *args],
        env={**os.environ, **path, **env},
        capture_output=True,
        text=True,
        check=False,
    )


# Help, version, startup.


def test_help_names_the_commands_and_the_exit_codes(run: Run) -> None:
    for args in (["--help"], ["-h"]):
        code, out, _ = run(*args)
        assert code == 0
        for word in ("report", "check", "solve", "FILE.py:FACTORY", "bad input"):
            assert word in out


@pytest.mark.parametrize("command", ["report", "check", "solve"])
def test_every_command_has_help(run: Run, command: str) -> None:
    code, out, _ = run(command, "--help")
    assert code == 0
    assert command in out


def test_the_version(run: Run) -> None:
    from memplan import __version__

    assert run("--version") == (0, f"memplan {__version__}\n", "")


@pytest.mark.parametrize("args", [["nonsense"], ["--nonsense"], ["solve"], ["solve", "a", "b"], ["report", "--infer"]])
def test_wrong_usage_is_bad_input(run: Run, args: list[str]) -> None:
    assert run(*args)[0] == 2


@pytest.mark.parametrize(
    "args",
    [["--help"], ["report", "--help"], ["solve", "buffers.csv"], ["check", "plan.json", "--max-arena", "1GiB"],
     ["report", "plan.json"], ["solve", "missing.csv"]],
)  # fmt: skip
def test_torch_is_not_imported(args: list[str], plan_file: Path, csv_file: Path) -> None:
    code = (
        "import sys; from memplan.cli import main; main(sys.argv[1:]); "
        "assert not {'torch', 'transformers'} & set(sys.modules), 'imported'"
    )
    done = _python(code, *args)
    assert done.returncode == 0, done.stderr


def test_help_needs_no_solver_beyond_the_standard_library() -> None:
    code = (
        "import sys; from memplan.cli import main; main(['--help']); assert not {'torch', 'numba'} & set(sys.modules)"
    )
    assert _python(code).returncode == 0


def test_it_runs_as_a_module(plan_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "check", str(plan_file), "--max-arena", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")


# solve


def test_solve_prints_the_figures(run: Run, csv_file: Path) -> None:
    code, out, err = run("solve", csv_file)
    assert (code, err) == (0, "")
    for label in ("buffers", "max live", "arena", "fragmentation", "optimal", "solver", "seconds"):
        assert label in out
    assert "48 B" in out


def test_solve_writes_offsets(run: Run, csv_file: Path, tmp_path: Path) -> None:
    out_file = tmp_path / "placed.csv"
    assert run("solve", csv_file, "-o", out_file)[0] == 0
    rows = [line.split(",") for line in out_file.read_text().splitlines()]
    assert rows[0] == ["id", "lower", "upper", "size", "offset"]
    assert [row[0] for row in rows[1:]] == ["a", "b", "c"]
    assert run("solve", out_file)[0] == 0  # its own output is an input


@pytest.mark.parametrize("solver", ["auto", "greedy", "naive", "partition"])
def test_solve_as_json_with_every_solver(run: Run, csv_file: Path, solver: str) -> None:
    code, out, _ = run("solve", csv_file, "--solver", solver, "--json", "--seed", 3, "--time-limit", 5)
    data = json.loads(out)
    assert code == 0
    assert data["max_live"] == 48
    assert data["arena_size"] >= 48
    assert sorted(data["offsets"]) == ["a", "b", "c"]
    assert data["fragmentation"] == pytest.approx(1 - 48 / data["arena_size"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_solve_exits_1_when_nothing_fits(run: Run, csv_file: Path, tmp_path: Path, form: list[str]) -> None:
    code, out, err = run("solve", csv_file, "--capacity", "40", "-o", tmp_path / "out.csv", *form)
    assert code == 1
    assert re.search("infeasible|unknown", out)
    assert "out.csv was not written" in err
    assert not (tmp_path / "out.csv").exists()


def test_solve_takes_the_capacity_from_the_files_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.40.csv").write_text(CSV)
    assert run("solve", "x.40.csv")[0] == 1
    assert run("solve", "x.40.csv", "--capacity", "1KiB")[0] == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1"),
        ("name,from,to,bytes\n", ":1"),
        ("id,lower,upper\na,0,1\n", ":1"),
        ("id,lower,upper,size\na,0,1,-5\n", ":2"),
        ("id,lower,upper,size\na,0,1,5\nb,3,1,5\n", ":3"),
        ("id,lower,upper,size\na,0,1,5\na,0,1,5\n", "'a'"),
        ("id,lower,upper,size\na,0,1\n", ":2"),
        ("id,lower,upper,size\na,0,1,x\n", ":2"),
        ("\x00\x01\x02", "buffers.csv"),
        (b"\xff\xfe\x00\xd8", "buffers.csv"),
    ],
)
def test_a_bad_csv_is_bad_input(run: Run, tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "buffers.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("solve", "buffers.csv", "-o", "out.csv")
    assert (code, out) == (2, "")
    assert "buffers.csv" in err
    assert message in err
    assert [p.name for p in tmp_path.iterdir()] == ["buffers.csv"]


def test_a_missing_file_and_a_folder_are_bad_input(run: Run, tmp_path: Path) -> None:
    for path in ("missing.csv", tmp_path):
        code, out, err = run("solve", path)
        assert (code, out) == (2, "")
        assert "cannot be read" in err


def test_an_unwritable_output_is_bad_input_and_leaves_nothing(run: Run, csv_file: Path, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for target in ("no/such/folder/out.csv", "folder"):
        code, out, err = run("solve", csv_file, "-o", target)
        assert (code, out) == (2, "")
        assert "cannot be written" in err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["buffers.csv", "folder"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--capacity", "3gib"], "--capacity"),
        (["--capacity", "-1"], "--capacity"),
        (["--time-limit", "nan"], "--time-limit"),
        (["--time-limit", "0"], "--time-limit"),
        (["--time-limit", "-1"], "--time-limit"),
        (["--solver", "magic"], "greedy"),
    ],
)
def test_bad_options_name_themselves(run: Run, csv_file: Path, args: list[str], message: str) -> None:
    code, out, err = run("solve", csv_file, *args)
    assert (code, out) == (2, "")
    assert message in err


# check


def test_check_passes_when_every_limit_is_kept(run: Run, plan_file: Path) -> None:
    code, out, err = run("check", plan_file, "--max-arena", "320", "--max-fragmentation", "0", "--max-outside", "248B")
    assert (code, err) == (0, "")
    assert out.count("ok") == 3
    assert "FAIL" not in out


def test_check_fails_by_one_byte_and_says_who(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", plan_file, "--max-arena", "319")
    assert code == 1
    for text in ("FAIL", "320 B", "319 B", "1 B", "h.0.attn", "model.py:12", "layers[1].norm"):
        assert text in out


def test_check_shows_what_is_outside(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", plan_file, "--max-outside", "247")
    assert code == 1
    assert re.search(r"parameters +100 B", out)


def test_check_takes_several_plans(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan(alignment=512).save(tmp_path / "large.json")
    code, out, _ = run("check", plan_file, "large.json", "--max-arena", "320")
    assert code == 1
    assert out.count("ok ") == 1
    assert out.count("FAIL") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no limit is given"),
        (["--max-arena", "much"], "--max-arena: 'much'"),
        (["--max-fragmentation", "2"], "--max-fragmentation"),
        (["--max-outside", "3gib"], "write GiB"),
    ],
)
def test_bad_limits_are_bad_input(run: Run, plan_file: Path, args: list[str], message: str) -> None:
    code, out, err = run("check", plan_file, *args)
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.json", "cannot be read"),
        ("", "neither a plan file nor"),
        ("nonsense", "neither a plan file nor"),
        ("model.py", "model.py:FACTORY"),
        ("model.py:f", "no such file"),
        (".", "neither a plan file nor"),
        ("broken.json", "is not JSON"),
        ("other.json", "is not a plan"),
        ("future.json", "schema version 99"),
    ],
)
def test_what_is_no_plan_is_bad_input(run: Run, tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "future.json").write_text('{"schema_version": 99}')
    for command in (["check", "--max-arena", "1GiB"], ["report"]):
        code, out, err = run(*command, target)
        assert (code, out) == (2, "")
        assert message in err
        assert "error: " in err


# report


def test_report_shows_a_saved_plan(run: Run, plan_file: Path) -> None:
    code, out, err = run("report", plan_file)
    assert (code, err) == (0, "")
    for text in ("sample", "peak (max live)", "arena", "fragmentation", "outside the arena", "h.0.attn", "model.py:12"):
        assert text in out


def test_report_writes_json_and_the_plan(run: Run, plan_file: Path, tmp_path: Path) -> None:
    code, out, _ = run("report", plan_file, "--json", "figures.json", "--save", "copy.json", "--format", "markdown")
    assert code == 0
    assert out.startswith("## sample")
    assert json.loads((tmp_path / "figures.json").read_text())["arena_size"] == 320
    assert planfile.load(tmp_path / "copy.json") == sample_plan()


def test_report_prints_json(run: Run, plan_file: Path) -> None:
    code, out, _ = run("report", plan_file, "--format", "json")
    assert code == 0
    assert json.loads(out)["total"] == sample_plan().total


@pytest.mark.parametrize("option", ["--json", "--save"])
def test_report_into_nowhere_is_bad_input(run: Run, plan_file: Path, option: str) -> None:
    code, out, err = run("report", plan_file, option, "no/folder/x.json")
    assert (code, out) == (2, "")
    assert "cannot be written" in err


@pytest.mark.parametrize("args", [["--infer"], ["--solver", "naive"], ["--time-limit", "3"]])
def test_options_of_planning_do_not_fit_a_saved_plan(run: Run, plan_file: Path, args: list[str]) -> None:
    code, _, err = run("report", plan_file, *args)
    assert code == 2
    assert "is a saved plan" in err


# Models: the tracer is a stand-in, so that these are tests of the command line.


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
    assert options == {"train": None, "solver": "auto", "time_limit": None}


def test_report_passes_its_options_on(run: Run, tracer: FakeTracer) -> None:
    assert run("report", "model.py:make", "--infer", "--solver", "naive", "--time-limit", "2")[0] == 0
    assert tracer.calls[0][1] == {"train": False, "solver": "naive", "time_limit": 2.0}


def test_check_plans_models_and_loads_plans(run: Run, tracer: FakeTracer, plan_file: Path) -> None:
    assert run("check", "model.py:make", plan_file, "--max-arena", "1KiB", "--infer")[0] == 0
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
    assert run("check", "real.json", "--max-arena", plan.arena_size)[0] == 0
    assert run("report", "real.py:net", "--infer")[1].startswith("real.py:net: forward only")


def test_a_real_model_gives_the_same_file_under_any_hash_seed(tmp_path: Path) -> None:
    (tmp_path / "real.py").write_text(NET)
    code = "import sys; from memplan.cli import main; sys.exit(main(sys.argv[1:]))"
    for seed in ("1", "2"):
        done = _python(code, "report", "real.py:net", "--save", f"{seed}.json", PYTHONHASHSEED=seed)
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


# Terminals.


def _on_a_terminal(args: list[str], **env: str) -> str:
    """What `memplan ARGS` writes to a pseudo-terminal."""
    ours, theirs = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-m", "memplan", *args],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm-256color", **env},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    text = b""
    try:
        while block := os.read(ours, 65536):
            text += block
    except OSError:  # how Linux says that the other end was closed
        pass
    os.close(ours)
    child.wait()
    return text.decode()


def test_colours_are_for_terminals_that_want_them(plan_file: Path) -> None:
    args = ["check", str(plan_file), "--max-arena", "1"]
    assert "\x1b[1;31m" in _on_a_terminal(args)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", _on_a_terminal(args, NO_COLOR="1"))


def test_narrow_terminals_are_not_overrun(plan_file: Path) -> None:
    text = _on_a_terminal(["report", str(plan_file)], COLUMNS="40", NO_COLOR="1")
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "\n").splitlines()
    assert max(map(len, lines)) <= 40


def test_what_is_no_terminal_gets_no_escapes(run: Run, plan_file: Path) -> None:
    for args in (["report", plan_file], ["check", plan_file, "--max-arena", "1"], ["--help"]):
        assert "\x1b" not in run(*args)[1]


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    (tmp_path / "é.csv").write_text(CSV)
    sample_plan().save(tmp_path / "é.json")
    for args in (["report", "é.json"], ["solve", "é.csv"], ["solve", "ü.csv"], ["check", "é.json", "--max-arena", "1"]):
        done = subprocess.run(
            [sys.executable, "-m", "memplan", *args],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONIOENCODING": "ascii"},
            capture_output=True,
            check=False,
        )
        done.stdout.decode("ascii")
        assert b"Traceback" not in done.stderr


def test_names_in_a_plan_move_no_cursor(run: Run, tmp_path: Path) -> None:
    data = json.loads(planfile.to_text(sample_plan()))
    data["model"] = "evil\x1b[2J\rmodel[bold]"
    body = {k: v for k, v in data.items() if k not in ("schema_version", "fingerprint", "checksum")}
    (tmp_path / "evil.json").write_text(json.dumps({**data, "checksum": planfile.checksum(body)}))
    out = run("report", "evil.json")[1]
    assert "\x1b" not in out
    assert "evil\\x1b[2J\\rmodel[bold]" in out
