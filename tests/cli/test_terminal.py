"""Encodings and escapes: what a terminal and a pipe get."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

from memplan.planning import planfile
from memplan.planning.make_plan import ScheduledGraph, make_plan
from tests.cli.helpers import CSV, Run
from tests.samples import sample_plan


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
