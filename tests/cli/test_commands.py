"""Commands with what they print and write: report, check, diff, explain, fits; stages of long work."""

from __future__ import annotations

import json
import pickle
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from memplan.cli.console import stages
from memplan.planning import planfile
from memplan.report.memory_viz import snapshot
from memplan.report.picture import picture_of_plan
from tests.analysis.test_allocated import Hostile, write
from tests.cli.helpers import Run, embedded_data
from tests.samples import sample_plan

# -- `memplan report` on saved plans -----------------------------------------------------------------------------------


def test_report_shows_a_saved_plan(run: Run, plan_file: Path) -> None:
    code, out, err = run("report", plan_file)
    assert (code, err) == (0, "")
    for text in ("sample", "peak (max live)", "arena", "beside the arena", "h.0.attn", "model.py:12"):
        assert text in out


def test_report_for_github(run: Run, plan_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = run("report", plan_file, "--format", "github")
    assert code == 0
    assert "::notice title=memplan" not in out
    assert (
        "::notice title=sample%3A forward + backward%2C 5 steps%2C 3 buffers::This step needs 768 B with AdamW" in out
    )
    assert (tmp_path / "summary.md").read_text().startswith("## sample")


# -- The files with pictures that the command line writes --------------------------------------------------------------


SVG = "{http://www.w3.org/2000/svg}"


def test_the_command_line_writes_them_all(run: Run, plan_file: Path, tmp_path: Path) -> None:
    files = {"--html": "r.html", "--svg": "r.svg", "--snapshot": "r.pickle"}
    args = [word for option in files.items() for word in option]
    code, out, err = run("report", plan_file, *args, "--save", "plan2.json")
    assert code == 0
    assert [line.split()[:2] for line in err.splitlines()] == [
        ["wrote", file] for file in ("plan2.json", *files.values())
    ]
    assert out.startswith("sample")
    assert planfile.load(tmp_path / "plan2.json") == sample_plan()
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert ET.parse(tmp_path / "r.svg").getroot().tag == f"{SVG}svg"
    assert pickle.loads((tmp_path / "r.pickle").read_bytes())["segments"]


# -- `memplan check` ---------------------------------------------------------------------------------------------------


def test_check_passes_when_every_limit_is_kept(run: Run, plan_file: Path) -> None:
    code, out, err = run(
        "check",
        plan_file,
        "--max-arena",
        "320B",
        "--max-fragmentation",
        "0",
        "--max-outside",
        "248B",
        "--max-total",
        f"{sample_plan().total + 200}B",  # with the two moments of AdamW
    )
    assert (code, err) == (0, "")
    assert out.count("ok") == 4
    assert "FAIL" not in out


def test_check_fails_by_one_byte_and_says_who(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", plan_file, "--max-arena", "319B", "--max-total", f"{sample_plan().total - 1}B")
    assert code == 1
    assert out.count("FAIL") == 2
    for text in ("320 B", "319 B", "1 B", "h.0.attn", "model.py:12", "layers[1].norm"):
        assert text in out


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("missing.json", "cannot be read"),
        ("", "neither a plan file nor"),
        ("nonsense", "neither a plan file nor"),
        ("model.py", "model.py:FACTORY"),
        ("model.py:f", "no such file"),
        (".", "neither a plan file nor"),
        ("broken.json", "is not JSON"),
        ("other.json", "is not a plan"),
        ("future.json", "schema version 99"),
    ],
)
def test_what_is_no_plan_is_bad_input(run: Run, tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "future.json").write_text('{"schema_version": 99}')
    for command in (["check", "--max-arena", "1GiB"], ["report"]):
        code, out, err = run(*command, target)
        assert (code, out) == (2, "")
        assert message in err
        assert "error: " in err


# -- `memplan diff snapshot.pickle plan.json` --------------------------------------------------------------------------


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


# -- `memplan fits` ----------------------------------------------------------------------------------------------------


MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)), torch.randn(16, 64)

def any_batch(batch=4):
    model, _ = net()
    return model, torch.randn(batch, 64)

def breaks(batch=4):
    raise RuntimeError(f"no batch of {batch}")
"""


@pytest.fixture
def small_model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)


@pytest.mark.usefixtures("small_model")
def test_a_model_fits_or_not(run: Run) -> None:
    code, out, err = run("fits", "net.py:net", "--target", "1MiB", "--slack", "0%")
    assert code == 0
    assert "net.py:net (float32, batch 16) fits 1MiB" in out
    assert "largest batch that fits" in out
    assert "tracing" in err  # a line for each stage, without a terminal
    code, out, _ = run("fits", "net.py:any_batch", "--target", "100KiB", "--format", "json", "--batch", "256")
    found = json.loads(out)
    assert (code, found["fits"], found["batch"], found["model"]) == (1, False, 256, "net.py:any_batch")
    need = found["need"]
    beside = max(need["arena"] + need["during"], need["gradients"] + need["kept"] + need["temporaries"])
    assert found["total"] == beside + sum(need[part] for part in ("parameters", "state", "inputs"))
    assert found["smallest"] > 100 << 10
    for named in (("--target", "h100"), ("--target", "sm90:79.1GiB")):
        out = run("fits", "net.py:net", *named, "--infer", "--no-search", "--format", "markdown")[1]
        assert "| context, libraries | 1.00 GiB |" in out
        assert named[1] in out.split("kernels are")[1]


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 256,
    "max_position_embeddings": 32,
    "dtype": "bfloat16",
}


def test_a_model_of_transformers_fits_by_its_configuration(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    sized = ("fits", "--hf", "config.json", "--target", "sm89:640KiB", "--slack", "0", "--allowance", "0", "--train")
    asked = (*sized, "--kernels", "aten")
    code, out, _ = run(*asked)
    assert code == 1
    assert "config.json (bfloat16, batch 1) does not fit" in out
    assert "fits with the model on the CPU" in out
    assert "bound by" in out
    longer = [json.loads(run(*asked, "--no-search", "--format", "json", *more)[1]) for more in ((), ("--length", "64"))]
    assert longer[0]["need"]["parameters"] == longer[1]["need"]["parameters"]
    assert longer[0]["need"]["arena"] < longer[1]["need"]["arena"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "lama"}))
    assert "config.json of a causal language model" in run(*asked)[2]
    monkeypatch.setattr("memplan.trace.step_example.find_spec", lambda name: None)
    assert "pip install transformers" in run(*asked)[2]


# -- Stages of long work: a line for each in a log, one changing line on a terminal ------------------------------------


def test_a_log_has_a_line_for_each_stage_with_the_seconds_so_far(capsys: pytest.CaptureFixture[str]) -> None:
    with stages("Planning net") as tell:
        tell("tracing")
        tell("planning")
    lines = [line.split("s  ") for line in capsys.readouterr().err.splitlines()]
    assert [said for _, said in lines] == ["Planning net: tracing", "Planning net: planning"]
    assert all(float(seconds) >= 0 for seconds, _ in lines)


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
