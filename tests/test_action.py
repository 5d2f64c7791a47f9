"""`action.yml`, the hook of pre-commit, and the example workflow: read as GitHub reads them, and run here."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.samples import sample_plan

ROOT = Path(__file__).parent.parent
WORKFLOW = yaml.safe_load((ROOT / "docs/examples/memory.yml").read_text(encoding="utf-8"))
ACTION = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))


def step(name: str) -> dict[str, Any]:
    (found,) = (one for one in ACTION["runs"]["steps"] if one["name"] == name)
    return dict(found)


def run(folder: Path, script: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a step's script as a runner does, with a `gh` that writes down what it is called with."""
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    (tools / "gh").write_text('#!/bin/sh\necho "$@" > "$CALLED"\n')
    (tools / "gh").chmod(stat.S_IRWXU)
    (tools / "python").unlink(missing_ok=True)
    (tools / "python").symlink_to(sys.executable)
    own = {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *sys.path)))}
    files = {"GITHUB_OUTPUT": str(folder / "output"), "GITHUB_STEP_SUMMARY": str(folder / "summary")}
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script],
        cwd=folder,
        env={**os.environ, **own, **files, "CALLED": str(folder / "called"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_example_workflow_uses_the_action_with_inputs_that_it_has() -> None:
    (used,) = (one for one in WORKFLOW["jobs"]["check"]["steps"] if "memplan" in one.get("uses", ""))
    assert set(used["with"]) <= set(ACTION["inputs"])
    assert used["uses"].endswith("@v0.1.0")
    assert all("description" in one for one in ACTION["inputs"].values())
    assert WORKFLOW["permissions"]["pull-requests"] == "write"


@pytest.mark.parametrize(("limit", "status"), [("320B", 0), ("319B", 1), ("'3 2 0'", 2), ("320B; touch hacked", 2)])
def test_the_check_passes_fails_and_executes_no_input(tmp_path: Path, limit: str, status: int) -> None:
    sample_plan().save(tmp_path / "plan.json")
    done = run(tmp_path, step("Check")["run"], ARGUMENTS=f"plan.json --max-arena {limit}")
    assert done.returncode == status, done.stderr
    assert not (tmp_path / "hacked").exists()
    table = Path((tmp_path / "output").read_text().strip().removeprefix("table="))
    assert (tmp_path / "summary").read_text() == table.read_text()
    assert ("plan.json" in table.read_text()) is (status < 2)
    if status == 1:
        assert "::error" in done.stdout
        done = run(tmp_path, step("Comment")["run"], NUMBER="7", TABLE=str(table), GITHUB_REPOSITORY="o/r")
        assert done.returncode == 0
        assert (tmp_path / "called").read_text() == f"pr comment 7 --repo o/r --body-file {table}\n"
    table.unlink()


def test_the_comment_is_written_for_failed_pull_requests_only() -> None:
    condition = step("Comment")["if"]
    for part in ("failure()", "inputs.comment == 'true'", "github.event_name == 'pull_request'"):
        assert part in condition
    assert "${{" not in "".join(one["run"] for one in ACTION["runs"]["steps"])  # inputs come by environment alone


def test_the_hook_of_pre_commit_runs_what_pyproject_lists(tmp_path: Path) -> None:
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text(encoding="utf-8"))
    assert (hook["id"], hook["language"], hook["pass_filenames"]) == ("memplan-check", "system", False)
    sample_plan().save(tmp_path / "plan.json")
    for limit, status in (("320B", 0), ("319B", 1)):
        (tmp_path / "pyproject.toml").write_text(
            f'[tool.memplan]\nmodels = ["plan.json"]\nfail-over = ["arena:{limit}"]\n'
        )
        done = run(tmp_path, f"python -m {hook['entry']}")
        assert done.returncode == status, done.stderr
