"""`memplan check`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import Run
from tests.samples import sample_plan


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
