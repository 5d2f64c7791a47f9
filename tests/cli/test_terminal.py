"""Colours, widths, encodings: what a terminal, a log and a pipe get."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.instances import planted
from memplan.planning import planfile
from memplan.planning.make_plan import ScheduledGraph, make_plan
from tests.cli.helpers import CSV, Run, write_buffers
from tests.samples import sample_plan


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
    args = ["check", str(plan_file), "--max-arena", "1B"]
    assert "\x1b[1;31m" in _on_a_terminal(args)
    assert not re.search(r"\x1b\[[0-9;]*3[0-7]m", _on_a_terminal(args, NO_COLOR="1"))


def test_a_terminal_sees_the_best_arena_while_it_is_searched(tmp_path: Path) -> None:
    path, problem = tmp_path / "hard.csv", planted(400, seed=1, density=0.95)
    write_buffers(path, problem)
    text = _on_a_terminal(["solve", str(path), "--time-limit", "3"], COLUMNS="150")
    assert re.search(r"\d:\d\d\S* Placing 400 buffers: arena .* B\W+bound .*1,024 B", text)
    assert "Placing" not in _on_a_terminal(["solve", str(path), "--time-limit", "1", "-q"], COLUMNS="150")


def test_a_narrow_check_says_by_how_much(run: Run, plan_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    out = run("check", plan_file.name, "--max-arena", "1B", "--max-outside", "1MiB")[1]
    assert re.search(r"FAIL +plan\.json +arena +319 B", out)
    assert "arena of plan.json is 320 B: 319 B more than 1 B" in " ".join(out.split())
    assert re.search(r"ok +plan\.json +outside", out)
    assert max(map(len, out.splitlines())) <= 40


def test_what_is_no_terminal_gets_no_escapes(run: Run, plan_file: Path) -> None:
    for args in (["report", plan_file], ["check", plan_file, "--max-arena", "1B"], ["--help"]):
        assert "\x1b" not in run(*args)[1]


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    (tmp_path / "é.csv").write_text(CSV)
    sample_plan().save(tmp_path / "é.json")
    for args in (
        ["report", "é.json"],
        ["solve", "é.csv"],
        ["solve", "ü.csv"],
        ["check", "é.json", "--max-arena", "1B"],
    ):
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


def test_a_pipe_gets_no_spinner_and_no_broken_names(tmp_path: Path) -> None:
    plan = sample_plan()
    name = "encoder.layers.11.attention.self.query_key_value_projection.with_a_long_name"
    storages = tuple(
        dataclasses.replace(s, origin=dataclasses.replace(s.origin, module=name)) for s in plan.graph.storages
    )
    graph = dataclasses.replace(plan.graph, storages=storages)
    long = make_plan(ScheduledGraph(model="m", graph=graph, schedule=plan.schedule, alignment=64, versions={}))
    (tmp_path / "buffers.csv").write_text(CSV)
    long.save(tmp_path / "plan.json")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FORCE_COLOR": "1"}
    for args in (["report", "plan.json"], ["explain", "plan.json"], ["solve", "buffers.csv"]):
        done = subprocess.run(
            [sys.executable, "-m", "memplan", *args], env=env, capture_output=True, text=True, check=True, cwd=tmp_path
        )
        assert done.stderr == ""
        assert args[0] == "solve" or name in done.stdout
