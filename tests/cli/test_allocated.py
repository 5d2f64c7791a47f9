"""`memplan diff snapshot.pickle plan.json`."""

from __future__ import annotations

import json
from pathlib import Path

from memplan.report.picture import picture_of_plan
from memplan.report.snapshot import snapshot
from tests.analysis.test_allocated import Hostile, write
from tests.cli.helpers import Run
from tests.samples import sample_plan


def test_the_command_line_compares_it_with_a_plan(run: Run, tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    write(tmp_path / "own.pickle", snapshot(picture_of_plan(plan)))
    code, out, err = run("diff", tmp_path / "own.pickle", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert "320 B allocated at the peak" in out
    assert "reserved by the allocator" in out
    data = json.loads(run("diff", tmp_path / "own.pickle", tmp_path / "plan.json", "--format", "json")[1])
    assert (data["peak"], data["arena"], data["total"]) == (plan.max_live, plan.arena_size, plan.total)
    assert sum(line["planned"] for line in data["lines"]) == plan.max_live
    write(tmp_path / "bad.pkl", Hostile())
    code, out, err = run("diff", tmp_path / "bad.pkl", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    assert "plain data only" in err
    assert run("diff", tmp_path / "none.pkl", tmp_path / "plan.json")[0] == 2


def test_files_of_the_profiler_are_compared_with_a_plan(run: Run, tmp_path: Path) -> None:
    plan = sample_plan()
    plan.save(tmp_path / "plan.json")
    (tmp_path / "t.json").write_text(json.dumps([[1, 2], [[0, 100, 0, 40, 0, 200, 0, 0, 8], [0] * 9]]))
    code, out, err = run("diff", tmp_path / "t.json", tmp_path / "plan.json")
    assert (code, err) == (0, "")
    assert "t.json: 348 B allocated at the peak" in out
    assert "reserved" not in out
    data = json.loads(run("diff", tmp_path / "t.json", tmp_path / "plan.json", "--format", "json")[1])
    assert (data["peak"], data["device"], data["recorded"]["unknown"]) == (348, None, 8)
    assert data["kinds"][0] == {"kind": "parameters", "allocated": 100, "planned": 100}
    event = {"Addr": 1, "Bytes": 500, "Total Allocated": 500, "Device Type": 1, "Device Id": 3}
    trace = {"schemaVersion": 1, "traceEvents": [{"name": "[memory]", "ph": "i", "ts": 1, "args": event}]}
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    assert "device 3: 500 B allocated" in run("diff", tmp_path / "trace.json", tmp_path / "plan.json")[1]
    code, out, err = run("diff", tmp_path / "t.json", tmp_path / "plan.json", "--html", tmp_path / "page.html")
    assert (code, out, (tmp_path / "page.html").exists()) == (2, "", False)
    assert "a recording has no plan" in err
    (tmp_path / "bad.json").write_text('{"traceEvents": []}')
    code, out, err = run("diff", tmp_path / "bad.json", tmp_path / "plan.json")
    assert (code, out) == (2, "")
    assert "profile_memory=True" in err
    assert run("diff", tmp_path / "none.json.gz", tmp_path / "plan.json")[0] == 2
