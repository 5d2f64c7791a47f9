"""What the README shows is run: its Python blocks in order, its commands by name."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memplan.check.project import find_project
from memplan.cli import main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = _blocks("python")
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, namespace)


def _commands() -> list[list[str]]:
    lines = [line for block in _blocks("sh") for line in block.splitlines()]
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("memplan ")]


def test_every_command_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    (tmp_path / "buffers.csv").write_text("id,lower,upper,size\na,0,2,8\nb,1,3,4\n")
    commands = [command for command in _commands() if command[0] != "demo"]  # which has a test of its own
    assert len(commands) > 8
    for command in commands:
        status = main(command)
        assert status == 0, (command, capsys.readouterr())
    assert {"plan.json", "report.html", "report.svg", "solved.csv", "solved.svg"} <= {
        p.name for p in tmp_path.iterdir()
    }


def test_the_project_table_is_understood(tmp_path: Path) -> None:
    (block,) = _blocks("toml")
    (tmp_path / "pyproject.toml").write_text(block)
    project = find_project(tmp_path)
    assert project is not None
    assert len(project.entries) == 2


def test_the_scripts_and_links_exist() -> None:
    scripts = re.findall(r"^(scripts/\S+)", "\n".join(_blocks("sh")), flags=re.MULTILINE)
    assert scripts
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links
    for path in [*scripts, *links]:
        assert (ROOT / path).exists(), path
