"""`memplan budget`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import load, save
from memplan.schedule import traced
from tests.cli.helpers import Run, embedded_data
from tests.planning.test_budget import chain, within
from tests.runtime.budgets import FAST_LINK

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)))

    def forward(self, x):
        return self.layers(x).square().mean()

def net():
    return Net(), (torch.randn(256, 32),)
"""


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    graph = chain(8)
    save(
        make_plan(ScheduledGraph(model="chain", graph=graph, schedule=traced(graph), alignment=64, versions={})),
        tmp_path / "c.json",
    )
    return tmp_path / "c.json"


def test_a_saved_plan_needs_no_model(run: Run, saved: Path) -> None:
    code, out, err = run("budget", saved)
    assert (code, err) == (0, "")
    assert "smallest budget" in out
    assert "cannot be kept" in out
    data = json.loads(run("budget", saved, "--format", "json")[1])
    assert data["format"] == "memplan-frontier-3"
    assert data["points"][0]["seconds"] == data["base_seconds"]
    assert "| ---: |" in run("budget", saved, "--format", "markdown")[1]


def test_the_page(run: Run, saved: Path, tmp_path: Path) -> None:
    assert run("budget", saved, "--html", "f.html")[0] == 0
    data = json.loads(run("budget", saved, "--format", "json")[1])
    kept = [p for p in data["points"] if p.get("seconds") is not None]
    page = (tmp_path / "f.html").read_text()
    assert "cannot be kept" in page
    opened = embedded_data(page)
    assert len(opened["points"]) == len(kept)
    assert None not in [point["plan"] for point in opened["points"]], "a point opens its plan"
    assert [plan["maxLive"] for plan in opened["plans"]] == sorted({p["max_live"] for p in kept}, reverse=True)
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_page_locked_copies_have_a_limit(run: Run, saved: Path, tmp_path: Path) -> None:
    graph = chain(5, size=256 << 20)
    graph = replace(graph, storages=tuple(replace(s, device="cuda:0") for s in graph.storages))
    scheduled = ScheduledGraph(model="chain", graph=graph, schedule=traced(graph), alignment=512, versions={})
    save(make_plan(scheduled), tmp_path / "cuda.json")
    copied = []
    for file, limit in (("cuda.json", "1TiB"), ("cuda.json", "0"), (saved, "0")):
        code, out, _ = run("budget", file, "--policy", "flow", "--pinned-budget", limit, "--format", "json")
        assert code == 0
        copied.append(any(point.get("offloaded") for point in json.loads(out)["points"]))
    assert copied == [True, False, True], "copies of a step on the CPU are not page-locked"


def test_a_plan_with_evictions_is_judged_without_them(run: Run, saved: Path, tmp_path: Path) -> None:
    within("5MiB", chain(8)).save(tmp_path / "evicted.json")
    _, plain, _ = run("budget", saved, "--format", "json")
    code, out, err = run("budget", tmp_path / "evicted.json", "--format", "json")
    assert (code, err) == (0, "")
    assert json.loads(out)["points"] == json.loads(plain)["points"]


def test_a_report_with_a_budget(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    code, out, _ = run("report", "net.py:net", "--budget", "70%", "--costs", "a100", "--save", "p.json")
    assert code == 0
    assert "kept by 'auto'" in out
    assert "computed again" in out or "copied to the host" in out
    assert "kept by 'auto'" in run("report", "p.json", "--format", "markdown")[1]
    code, _, err = run("report", "net.py:net", "--budget", "1KiB")
    assert code == 2
    assert "give at least" in err
    assert run("report", "p.json", "--budget", "1KiB")[0] == 2


def test_a_report_with_limits_of_copies(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)
    FAST_LINK.save("fast.json")
    asked = ("report", "net.py:net", "--arena-budget", "60%", "--costs", "fast.json", "--save", "p.json")
    code, out, _ = run(*asked, "--pinned-budget", "1MiB", "--host-budget", "2MiB")
    assert code == 0
    assert "kept by 'auto'" in out
    plan = load("p.json")
    assert plan.eviction is not None
    assert (plan.eviction.pinned_budget, plan.eviction.host_budget) == (1 << 20, 2 << 20)
    assert 0 < plan.host_size <= 1 << 20
    code, _, err = run(*asked, "--pinned-budget", "50%")
    assert code == 2
    assert "pinned_budget" in err
