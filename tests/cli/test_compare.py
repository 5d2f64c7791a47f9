"""`memplan diff` and `memplan explain`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import Run, embedded_data
from tests.samples import sample_plan


def test_diff_of_a_plan_with_itself(run: Run, plan_file: Path) -> None:
    code, out, err = run("diff", plan_file, plan_file)
    assert (code, err) == (0, "")
    assert "the total stays 768 B" in out
    assert "the plans are the same" in out


def test_diff_shows_totals_and_buffers(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan(alignment=512).save(tmp_path / "large.json")
    code, out, _ = run("diff", plan_file, "large.json")
    assert code == 0
    for text in (
        "total 768 B -> 1.94 KiB (+1.19 KiB, +158.33 %)",
        "the same graph",
        "grew: 3 buffers",
        "h.0.attn",
        "model.py:12",
        "+384 B",
    ):
        assert text in out
    markdown = run("diff", plan_file, "large.json", "--format", "markdown")[1]
    assert markdown.startswith("## total 768 B ")
    assert "| arena | 320 B | 1.50 KiB | +1.19 KiB (+1,216 B, +380.00 %) |" in markdown
    data = json.loads(run("diff", plan_file, "large.json", "--format", "json")[1])
    assert data["before"]["arena"] == 320
    assert [pair["after"]["size"] for pair in data["grew"]] == [512, 512, 512]


def test_diff_draws_both_plans_on_one_page(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan(alignment=512).save(tmp_path / "large.json")
    code, out, err = run("diff", plan_file, "large.json", "--html", "diff.html")
    assert code == 0
    assert err.startswith("wrote diff.html")
    assert "grew: 3 buffers" in out
    page = (tmp_path / "diff.html").read_text()
    assert page.startswith("<!doctype html>")
    data = embedded_data(page)
    assert [plan["arena"] for plan in data["plans"]] == [320, 1536]
    assert ["arena", "320 B", "1.50 KiB", "+1.19 KiB (+1,216 B, +380.00 %)"] in data["totals"]


def test_a_recording_has_no_plan_to_draw(run: Run, plan_file: Path, tmp_path: Path) -> None:
    code, out, err = run("diff", "snapshot.pickle", plan_file, "--html", "d.html")
    assert (code, out) == (2, "")
    assert "a recording has no plan that could be drawn" in err
    assert not (tmp_path / "d.html").exists()


def test_explain_shows_who_is_alive_and_why(run: Run, plan_file: Path) -> None:
    code, out, err = run("explain", plan_file)
    assert (code, err) == (0, "")
    for text in ("step 3 (backward) aten.expand", "3 buffers are alive: 320 B, the peak", "waits, until step 4"):
        assert text in out
    assert "what would shrink it" in out
    out = run("explain", plan_file, "--at", "0", "--format", "markdown")[1]
    assert out.startswith("## sample, step 0 (forward) aten.mm in h.0.attn, model.py:12")
    data = json.loads(run("explain", plan_file, "--at", "peak", "--format", "json")[1])
    assert data["live"] == 320
    assert [held["role"] for held in data["held"]] == ["waits", "made", "last_use"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["explain", "plan.json", "--at", "5"], "its steps are 0 to 4"),
        (["explain", "plan.json", "--at", "-1"], ""),
        (["explain", "plan.json", "--at", "top"], "'top' is not a step of the plan"),
        (["explain", "none.json"], "cannot be read"),
        (["diff", "plan.json"], "AFTER"),
        (["diff", "plan.json", "none.json"], "cannot be read"),
    ],
)
def test_bad_input(run: Run, plan_file: Path, args: list[str], message: str) -> None:
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err
