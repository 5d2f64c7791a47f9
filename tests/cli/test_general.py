"""Help, version, usage, startup without torch."""

from __future__ import annotations

import os
import pkgutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import memplan
from tests.cli.helpers import Run, python


def test_help_names_the_commands_and_the_exit_codes(run: Run) -> None:
    for args in (["--help"], ["-h"]):
        code, out, _ = run(*args)
        assert code == 0
        for word in ("report", "check", "solve", "FILE.py:FACTORY", "bad input"):
            assert word in out


def test_the_version(run: Run) -> None:
    from memplan import __version__

    assert run("--version") == (0, f"memplan {__version__}\n", "")


@pytest.mark.parametrize("args", [["nonsense"], ["--nonsense"], ["solve"], ["solve", "a", "b"], ["report", "--infer"]])
def test_wrong_usage_is_bad_input(run: Run, args: list[str]) -> None:
    assert run(*args)[0] == 2


_NEVER = {"torch", "numba", "numpy", "ortools", "transformers"}
_NO_PLANS = {f"memplan.{room}" for room in ("core.plan", "solvers", "schedule", "evict", "trace", "report")}


@pytest.mark.parametrize(
    ("args", "forbidden"),
    [
        (["--help"], _NEVER | _NO_PLANS),
        (["check", "--help"], _NEVER | _NO_PLANS),
        (["--version"], _NEVER | _NO_PLANS | {"rich"}),
        (["check", "plan.json", "--max-arena", "1GiB"], _NEVER | {"memplan.trace", "memplan.evict.costs"}),
        (["explain", "plan.json"], _NEVER | {"memplan.trace", "memplan.evict.costs"}),
        (["report", "plan.json"], {"torch", "transformers"}),
        (["solve", "buffers.csv"], {"torch", "transformers"}),
    ],
)
def test_a_command_imports_only_what_it_needs(
    args: list[str], forbidden: set[str], plan_file: Path, csv_file: Path
) -> None:
    code = "import sys; from memplan.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    imported = set(python(code, *args).stderr.split())
    assert "memplan.cli" in imported
    assert not forbidden & imported


def test_no_package_exports_a_name_of_its_own_submodule() -> None:
    """Otherwise the attribute of the package depends on what was imported first."""
    packages = [
        memplan,
        *(import_module(f.name) for f in pkgutil.walk_packages(memplan.__path__, "memplan.") if f.ispkg),
    ]
    for package in packages:
        submodules = {found.name for found in pkgutil.iter_modules(package.__path__)}
        assert not submodules & set(package.__all__ if hasattr(package, "__all__") else ()), package.__name__
    assert not hasattr(memplan, "nonsense")


def test_it_runs_as_a_module(plan_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "memplan", "check", str(plan_file), "--max-arena", "1B"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
