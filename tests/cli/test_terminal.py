"""Encodings and escapes: what a terminal and a pipe get."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

from memplan.planning import planfile
from memplan.planning.make_plan import ScheduledGraph, make_plan
from tests.cli.helpers import CSV, Run, python
from tests.samples import sample_plan


def _in_turn(*commands: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Returns what one process of its own prints for several commands."""
    code = "import json, sys; from memplan.cli import main\nfor args in json.loads(sys.argv[1]): main(args)"
    return python(code, json.dumps(commands), **env)


def test_an_ascii_terminal_gets_ascii(tmp_path: Path) -> None:
    (tmp_path / "é.csv").write_text(CSV)
    sample_plan().save(tmp_path / "é.json")
    checked = ["check", "é.json", "--max-arena", "1B"]
    done = _in_turn(["report", "é.json"], ["solve", "é.csv"], ["solve", "ü.csv"], checked, PYTHONIOENCODING="ascii")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False)
    assert "FAIL" in done.stdout, "the last command has run"
    assert done.stdout.isascii()


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
    done = _in_turn(["report", "plan.json"], ["explain", "plan.json"], ["solve", "buffers.csv"], FORCE_COLOR="1")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count(name) >= 2
