"""`memplan check` as a regression gate: baselines, growth limits, pyproject.toml, formats."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memplan.check.baseline import read_baseline
from tests.cli.helpers import Run
from tests.samples import sample_plan


@pytest.fixture
def grown(plan_file: Path, run: Run) -> Path:
    """plan.json is in base.json with an arena of 320 bytes, and has one of 1,536 now."""
    assert run("check", "plan.json", "--baseline", "base.json", "--update-baseline")[0] == 0
    sample_plan(alignment=512).save(plan_file)
    return plan_file


def test_the_same_plan_keeps_its_baseline(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", "plan.json", "--baseline", "base.json", "--update-baseline")
    assert code == 0
    assert "wrote base.json: 1 updated" in out
    code, out, _ = run("check", "plan.json", "--baseline", "base.json")
    assert code == 0
    assert out.count("same") == 2
    assert "can shrink" not in out


def test_growth_fails_and_says_what_grew_and_where(run: Run, grown: Path) -> None:
    code, out, _ = run("check", "plan.json", "--baseline", "base.json")
    assert code == 1
    for text in ("FAIL", "1.50 KiB (1,536 B)", "1.19 KiB (1,216 B)", "+384 B", "+448 B", "h.*.attn", "model.py:12"):
        assert text in out
    assert out.count("FAIL") == 1  # the same bytes lie outside


@pytest.mark.parametrize(
    ("rule", "code"),
    [("arena:+379%", 1), ("arena:+380%", 0), ("arena:+1215B", 1), ("arena:+1216B", 0), ("arena:1535B", 1),
     ("arena:1536B", 0), ("outside:+0", 0), ("fragmentation:5%", 0), ("fragmentation:+0%", 0), ("total:+1KiB", 1)],
)  # fmt: skip
def test_every_rule_is_exact(run: Run, grown: Path, rule: str, code: int) -> None:
    assert run("check", "plan.json", "--baseline", "base.json", "--fail-over", rule)[0] == code


def test_a_limit_and_a_growth_are_checked_together(run: Run, grown: Path) -> None:
    args = ["--baseline", "base.json", "--fail-over", "arena:+2%", "--max-arena", "1KiB", "--format", "json"]
    code, out, _ = run("check", "plan.json", *args)
    assert code == 1
    data = json.loads(out)
    assert data["format"] == "memplan-check-2"
    assert not data["ok"]
    (one,) = data["checked"]
    assert [(f["rule"], f["measured"], f["limit"], f["before"]) for f in one["findings"]] == [
        ("arena:1KiB", 1536, 1024, 320),
        ("arena:+2%", 1536, 326, 320),
    ]
    assert sum(row["delta"] for row in one["findings"][1]["grown"]) == 1216


def test_an_improvement_says_that_the_baseline_can_shrink(run: Run, grown: Path) -> None:
    assert run("check", "plan.json", "--baseline", "base.json", "--update-baseline")[0] == 0
    sample_plan().save(grown)
    for form in ("table", "markdown", "github"):
        code, out, _ = run("check", "plan.json", "--baseline", "base.json", "--format", form)
        assert code == 0
        assert "aseline can shrink" in out
        assert "320 B" in out
    data = json.loads(run("check", "plan.json", "--baseline", "base.json", "--format", "json")[1])
    assert data["checked"][0]["gains"] == [{"of": "arena", "before": 1536, "now": 320}]


def test_an_update_keeps_the_others_and_refuses_what_is_over_a_limit(run: Run, grown: Path, tmp_path: Path) -> None:
    before = (tmp_path / "base.json").read_bytes()
    args = ("--baseline", "base.json", "--update-baseline")
    code, out, err = run("check", "plan.json", *args, "--max-arena", "1KiB", "--fail-over", "arena:+0")
    assert code == 1
    assert "FAIL" in out
    assert "base.json was not written" in err
    assert (tmp_path / "base.json").read_bytes() == before
    sample_plan().save(tmp_path / "other.json")
    assert run("check", "other.json", *args)[0] == 0
    assert {name: f.arena for name, f in read_baseline(tmp_path / "base.json").items()} == {
        "plan.json": 320,
        "other.json": 320,
    }


def test_an_update_refuses_an_invalid_plan(run: Run, grown: Path, tmp_path: Path) -> None:
    before = (tmp_path / "base.json").read_bytes()
    grown.write_text(grown.read_text().replace('"arena_size":1536', '"arena_size":100'))
    code, _, err = run("check", "plan.json", "--baseline", "base.json", "--update-baseline")
    assert code == 2
    assert "plan.json" in err
    assert (tmp_path / "base.json").read_bytes() == before


def test_github_gets_annotations_and_a_summary(
    run: Run, grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "summary.md").write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    code, out, _ = run("check", "plan.json", "--baseline", "base.json", "--format", "github")
    assert code == 1
    (line,) = [line for line in out.splitlines() if line.startswith("::error")]
    assert line.startswith("::error title=memplan%3A arena of plan.json::arena of plan.json is 1.50 KiB (1,536 B)")
    assert "%0A+448 B activation layers[*].norm" in line
    summary = (tmp_path / "summary.md").read_text()
    assert summary.startswith("before\n## memplan: 1 of 1 over a limit")
    assert "| +448 B | 1 | activation | layers\\[\\*\\].norm" in summary


def _annotated(run: Run, *args: object) -> str:
    """The properties of the first annotation of a failing check."""
    out = run("check", "plan.json", *(args or ("--baseline", "base.json")), "--format", "github")[1]
    line = next(line for line in out.splitlines() if line.startswith("::error "))
    return line.removeprefix("::error ").rpartition("title=")[0]


@pytest.fixture
def repository(grown: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The plan's "model.py" (lines 12 and 15) is src/net/model.py; an installed one and a hidden one do not count."""
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)
    (tmp_path / ".git").mkdir()
    (tmp_path / "venv").mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    for folder in ("src/net", "venv/lib", ".hidden", "node_modules/x"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "model.py").write_text("x = 1\n" * 20)
    return tmp_path


def test_an_annotation_stands_at_the_file_and_line_of_the_repository(run: Run, repository: Path) -> None:
    assert _annotated(run) == "file=src/net/model.py,line=15,"
    assert _annotated(run, "--max-arena", "1B") == "file=src/net/model.py,line=12,"


def test_a_traced_model_is_annotated_where_it_stands_and_its_plan_holds_no_path(run: Run, repository: Path) -> None:
    (repository / "src/net/tiny.py").write_text(
        "import torch\n\nclass Tiny(torch.nn.Module):\n    def forward(self, x):\n"
        "        return (x @ x).relu().sum()\n\ndef make():\n    return Tiny(), (torch.ones(64, 64),)\n"
    )
    assert run("report", "src/net/tiny.py:make", "--infer", "--save", "plan.json")[0] == 0
    assert str(repository) not in (repository / "plan.json").read_text()
    assert _annotated(run, "--max-arena", "1B") == "file=src/net/tiny.py,line=5,"


def test_pyproject_lists_what_is_checked(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan(alignment=512).save(tmp_path / "large.json")
    (tmp_path / "pyproject.toml").write_text(
        '[tool.memplan]\nmodels = ["plan.json", {target = "large.json", name = "large", fail-over = ["arena:1KiB"]}]\n'
        'baseline = "base.json"\nfail-over = ["arena:+0"]\n'
    )
    assert run("check", "--update-baseline")[0] == 1  # large is over its own limit
    assert not (tmp_path / "base.json").exists()
    config = tmp_path / "pyproject.toml"
    config.write_text(config.read_text().replace("1KiB", "2KiB"))
    assert run("check", "--update-baseline")[0] == 0
    code, out, _ = run("check")
    assert code == 0
    assert out.count("ok ") == 2
    assert run("check", "large")[1].count("ok ") == 1  # by its name, with its own rules
    sample_plan(alignment=512).save(plan_file)
    assert run("check")[0] == 1
    assert run("check", "large")[0] == 0


def test_what_the_project_no_longer_lists_is_mentioned(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan().save(tmp_path / "old.json")
    run("check", "old.json", "plan.json", "--baseline", "base.json", "--update-baseline")
    (tmp_path / "pyproject.toml").write_text('[tool.memplan]\nmodels = ["plan.json"]\nbaseline = "base.json"\n')
    code, _, err = run("check")
    assert code == 0
    assert "note: old.json is in the baseline" in err
    assert run("check", "--update-baseline")[0] == 0
    assert list(read_baseline(tmp_path / "base.json")) == ["plan.json"]
