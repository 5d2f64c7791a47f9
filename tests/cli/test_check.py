"""`memplan check`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.helpers import Run
from tests.samples import sample_plan


def test_check_passes_when_every_limit_is_kept(run: Run, plan_file: Path) -> None:
    code, out, err = run("check", plan_file, "--max-arena", "320", "--max-fragmentation", "0", "--max-outside", "248B")
    assert (code, err) == (0, "")
    assert out.count("ok") == 3
    assert "FAIL" not in out


def test_check_fails_by_one_byte_and_says_who(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", plan_file, "--max-arena", "319")
    assert code == 1
    for text in ("FAIL", "320 B", "319 B", "1 B", "h.0.attn", "model.py:12", "layers[1].norm"):
        assert text in out


def test_check_shows_what_is_outside(run: Run, plan_file: Path) -> None:
    code, out, _ = run("check", plan_file, "--max-outside", "247")
    assert code == 1
    assert re.search(r"parameters +100 B", out)


def test_check_takes_several_plans(run: Run, plan_file: Path, tmp_path: Path) -> None:
    sample_plan(alignment=512).save(tmp_path / "large.json")
    code, out, _ = run("check", plan_file, "large.json", "--max-arena", "320")
    assert code == 1
    assert out.count("ok ") == 1
    assert out.count("FAIL") == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "no limit is given"),
        (["--max-arena", "much"], "--max-arena: 'much'"),
        (["--max-fragmentation", "2"], "--max-fragmentation"),
        (["--max-outside", "3gib"], "write GiB"),
    ],
)
def test_bad_limits_are_bad_input(run: Run, plan_file: Path, args: list[str], message: str) -> None:
    code, out, err = run("check", plan_file, *args)
    assert (code, out) == (2, "")
    assert message in err


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


def test_a_limit_of_the_total(run: Run, plan_file: Path) -> None:
    total = sample_plan().total
    assert run("check", plan_file, "--max-total", f"{total}B")[0] == 0
    code, out, _ = run("check", plan_file, "--max-total", f"{total - 1}B")
    assert code == 1
    assert "total" in out
