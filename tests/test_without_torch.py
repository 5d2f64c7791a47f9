"""memplan as `pip install memplan` brings it, in a virtual environment of its own that has no torch."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

import memplan
from tests.samples import sample_plan

ROOT = Path(__file__).parent.parent
COMMAND = "pip install 'memplan[torch]'"
NEED_TORCH = {
    *("Backend", "CompiledModule", "CompiledStep", "Recording", "Tracker"),
    *("compile", "compile_step", "fits", "install_allocator", "max_batch", "partitioner"),
    *("plan_step", "profile", "record"),
}
NAMES = """
import importlib.util, json, memplan
assert importlib.util.find_spec("torch") is None
refused = {}
for name in memplan.__all__:
    try:
        getattr(memplan, name)
    except memplan.MemplanError as error:
        refused[name] = [type(error).__name__, str(error)]
try:
    memplan.plan(None)
except ImportError as error:
    refused["plan()"] = [type(error).__name__, str(error)]
print(json.dumps(refused))
"""
SOLVE = """
import memplan
buffers = [memplan.Buffer(id=str(i), size=64, live=memplan.Interval(i, i + 5)) for i in range(40)]
solution = memplan.solve(buffers)
memplan.validate(memplan.Problem(buffers=tuple(buffers)), solution)
print(memplan.load("plan.json").arena_size, solution.status.name)
many = [memplan.Buffer(id=str(i), size=64, live=memplan.Interval(i, i + 5)) for i in range(450)]
print(memplan.solve(many, solver="online-first").arena_size)  # so many are placed by compiled code
"""
MODEL = "raise AssertionError('a model is not imported without torch')"
TEST = """
import pytest
import memplan as package

@pytest.mark.memplan(arena="320 B")
def test_saved(memplan):
    assert memplan.check(package.load("plan.json")).arena_size == 320

def test_model(memplan):
    with pytest.raises(package.MemplanError, match="needs torch"):
        memplan.check(object(), arena=1)
"""
WORKS: dict[str, str] = {  # a command, and a part of what it prints
    "solve buffers.csv -o placed.csv": "arena",
    "report plan.json --html report.html --svg report.svg": "320 B",
    "explain plan.json": "peak",
    "diff plan.json plan.json": "",
    "check plan.json --max-arena 1KiB": "320 B",
    "doctor": "memplan[torch]",
}
INTERPRETED = ("doctor",)  # its search would take half a minute to compile, as nothing is compiled in a new environment
REFUSED = ("report model.py:make", "budget model.py:make", "check model.py:make --max-arena 1KiB", "demo")


def _run(folder: Path, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command in `folder`, without this checkout on Python's path, with more environment variables."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(
        [str(word) for word in command], cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False
    )


def _must(folder: Path, *command: str | Path, **variables: str) -> str:
    """Return what a command that must succeed prints."""
    done = _run(folder, *command, **variables)
    assert done.returncode == 0, (command, done.stdout, done.stderr)
    return done.stdout


def _pip(*arguments: str | Path) -> Sequence[str | Path]:
    return (sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments)


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """The interpreter of an environment with memplan's wheel and pytest; skips where no registry can be reached."""
    source, constraints = tmp_path / "source", ROOT / "constraints.txt"
    shutil.copytree(ROOT / "memplan", source / "memplan", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    try:
        probe = _run(tmp_path, *_pip("download", "--no-deps", "-c", constraints, "iniconfig"))
    except subprocess.TimeoutExpired:
        pytest.skip("no package registry answers")
    if probe.returncode:
        pytest.skip(f"no package registry can be reached: {probe.stderr[-200:]}")
    venv.create(tmp_path / "venv")
    found = tmp_path / "venv" / "bin" / "python"
    _must(tmp_path, *_pip("wheel", "--no-deps", "-w", tmp_path, source))
    (wheel,) = tmp_path.glob("memplan-*.whl")
    _must(tmp_path, *_pip("--python", found, "install", "--no-compile", "-c", constraints, wheel, "pytest"))
    return found


@pytest.mark.slow
def test_what_needs_no_torch_works_and_the_rest_says_what_to_install(python: Path, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    sample_plan().save(folder / "plan.json")
    (folder / "buffers.csv").write_text("id,lower,upper,size\na,0,2,64\nb,1,3,64\n", encoding="utf-8")
    (folder / "model.py").write_text(MODEL, encoding="utf-8")
    (folder / "test_memory.py").write_text(TEST, encoding="utf-8")

    refused = json.loads(_must(folder, python, "-c", NAMES))
    assert set(refused) == {*NEED_TORCH, "plan()"}
    assert set(memplan.__all__) >= NEED_TORCH
    for kind, message in refused.values():
        assert kind == "TorchNotInstalled"
        assert COMMAND in message
    assert _must(folder, python, "-c", SOLVE).split() == ["320", "OPTIMAL", "320"]
    for command, shown in WORKS.items():
        compiles = "1" if command in INTERPRETED else "0"
        found = _must(folder, python, "-m", "memplan", *command.split(), NUMBA_DISABLE_JIT=compiles)
        assert shown in found, command
    for command in REFUSED:
        done = _run(folder, python, "-m", "memplan", *command.split())
        assert done.returncode == 2, (command, done)
        assert COMMAND in done.stderr, command
        assert "Traceback" not in done.stderr, command
    assert "2 passed" in _must(folder, python, "-m", "pytest", "-q", "test_memory.py")
