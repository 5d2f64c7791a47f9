"""Help, version, usage, startup without torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import Run, python


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
    done = python(code, *args)
    assert done.returncode == 0, done.stderr


def test_help_needs_no_solver_beyond_the_standard_library() -> None:
    code = (
        "import sys; from memplan.cli import main; main(['--help']); assert not {'torch', 'numba'} & set(sys.modules)"
    )
    assert python(code).returncode == 0


def test_it_runs_as_a_module(plan_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "check", str(plan_file), "--max-arena", "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
