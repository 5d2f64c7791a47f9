"""`scripts/size.py`, which limits the code lines of each room."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.size import ROOT, code_lines, excesses, rooms

_SOURCE = '''"""A module."""

import os  # one

# nothing
def f(
    x: int,
) -> int:
    """Do it.

    Twice.
    """
    text = """two
lines"""
    return len(text) + x  # six with the signature's three and the text's two
'''


def test_comments_blank_lines_and_docstrings_are_no_code() -> None:
    assert code_lines(_SOURCE) == 1 + 3 + 2 + 1


@pytest.mark.parametrize(("limit", "code", "word"), [(7, 0, ""), (6, 1, "core: 7 code lines, 1 above its limit of 6")])
def test_a_room_above_its_limit_fails(tmp_path: Path, limit: int, code: int, word: str) -> None:
    (tmp_path / "memplan" / "core").mkdir(parents=True)
    (tmp_path / "memplan" / "core" / "it.py").write_text(_SOURCE)
    (tmp_path / "pyproject.toml").write_text(f"[tool.size]\ncore = {limit}\n")
    command = [sys.executable, "-m", "scripts.size", "--root", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.strip().startswith(word)) == (code, True)


def test_a_room_needs_a_limit() -> None:
    found = rooms(ROOT / "memplan")
    assert len(found) > 10
    first, *others = found
    assert [line.split(":")[0] for line in excesses(found, dict.fromkeys(others, 10**6))] == [first]
