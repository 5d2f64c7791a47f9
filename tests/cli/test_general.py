"""Help, usage, startup without torch; `memplan demo`, `memplan doctor`."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
from importlib import import_module
from pathlib import Path

import pytest

import memplan
from memplan.cli.demo import BEFORE
from memplan.core.units import format_exact
from memplan.planning import planfile
from memplan.torch_inside.versions import KNOWN
from tests.cli.helpers import Run, python
from tests.samples import sample_plan


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


def test_the_demo_shows_everything_and_leaves_its_files(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("demo", "-o", "shown")
    assert code == 0
    for part in (
        "1. What",
        "2. Where",
        "3. Does",
        "4. What if",
        "5. What if",
        "equal bit by bit",
        "FAIL",
        "+1008.0 KiB",
        "Done.",
    ):
        assert part in out
    plan = planfile.load(tmp_path / "shown" / "plan.json")
    assert plan.model == BEFORE, "by which the next demo knows its files"
    assert f"{plan.arena_size:,} B" in out
    names = ["budget.html", "plan.json", "report.html", "report.svg"]
    assert sorted(p.name for p in (tmp_path / "shown").iterdir()) == names
    (kept,) = (line for line in out.splitlines() if "kept by 'auto'" in line)
    assert f"arena budget {format_exact(int(plan.arena_size * 0.6))}, kept by 'auto'" in kept
    assert "computed again" in kept


def test_a_demo_that_cannot_write_is_bad_input(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    code, out, err = run("demo", "-o", "taken")
    assert (code, out) == (2, "")
    assert "give --output FOLDER" in err


@pytest.mark.parametrize("name", ["plan.json", "report.html", "report.svg", "budget.html"])
@pytest.mark.parametrize("content", ["mine", planfile.to_text(sample_plan())], ids=["text", "plan"])
def test_the_demo_overwrites_nothing_that_is_not_its_own(run: Run, tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / "shown").mkdir()
    (tmp_path / "shown" / name).write_text(content)
    code, out, err = run("demo", "-o", "shown")
    assert (code, out) == (2, "")
    assert f"--output: {Path('shown', name)} is not of an earlier demo, and would be overwritten" in err
    assert "next step: name another folder" in err
    assert [path.name for path in (tmp_path / "shown").iterdir()] == [name]
    assert (tmp_path / "shown" / name).read_text() == content


def test_doctor_says_what_there_is(run: Run) -> None:
    code, out, _ = run("doctor", "--json")
    assert code == 0
    found = {line["what"]: line for line in json.loads(out)}
    assert found["torch"]["ok"]
    assert found["device"]["found"].startswith(("cpu", "cuda"))
    assert [found[what]["found"] for what in ("eager's kernels", "Inductor's kernels")] == ["works"] * 2
    assert f"to {KNOWN[-1]} are tested" in found["Inductor's kernels"]["remark"]
    assert found["solve"]["found"].startswith("optimal")


def test_doctor_misses_what_is_needed_and_forgives_the_rest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *a: None if name in ("ortools", "torch", "diffusers") else find(name, *a),
    )
    code, out, _ = run("doctor")
    assert code == 1
    lines = {line.split()[1]: line.split()[0] for line in out.splitlines()[2:] if len(line.split()) > 1}
    names = ("ortools", "torch", "diffusers", "numpy")
    assert [lines[name] for name in names] == ["MISSING", "-", "-", "ok"]


@pytest.mark.parametrize("command", ["report", "check", "diff", "explain", "solve", "demo", "doctor"])
def test_every_command_is_on_the_help_page_and_has_its_own(run: Run, command: str) -> None:
    assert f"{command} " in run("--help")[1]
    code, out, _ = run(command, "--help")
    assert code == 0
    assert f"memplan {command}" in out
