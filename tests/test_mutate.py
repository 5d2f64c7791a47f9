"""`scripts/mutate.py`, run on a checkout of one module: its score."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "scripts" / "mutate.py"
MODULE = """def larger(a: int, b: int) -> int:
    return a if a > b else b


def half(a: int) -> int:
    return a // 2
"""
TEST = """from memplan.tiny import half, larger

def test_larger():
    assert (larger(1, 2), larger(2, 1)) == (2, 2)

def test_half():
    assert half(0) == 0
"""

needs_the_tool = pytest.mark.skipif(
    importlib.util.find_spec("cosmic_ray") is None, reason="cosmic-ray is in the extra `mutation`"
)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout of a module, its tests, and the script."""
    for name, text in (
        ("memplan/__init__.py", ""),
        ("memplan/tiny.py", MODULE),
        ("tests/test_tiny.py", TEST),
        ("pyproject.toml", "[tool.pytest.ini_options]\npythonpath = ['.']\n"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def _run(checkout: Path, *args: str, before: tuple[str, ...] = ()) -> tuple[int, str, str]:
    """The exit status, the output and the errors of the script in `checkout`."""
    done = subprocess.run(
        [sys.executable, *before, "scripts/mutate.py", *args],
        cwd=checkout,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    return done.returncode, done.stdout, done.stderr


@needs_the_tool
def test_it_counts_what_the_tests_notice_and_leaves_the_checkout_alone(checkout: Path) -> None:
    code, out, err = _run(checkout, "memplan/tiny.py", "--jobs", "2", "--least", "90")
    assert (code, err) == (1, "")
    first, *survivors, last = out.splitlines()
    counts = re.fullmatch(r"(\d+) killed, (\d+) survived, 0 timeout, 0 broken: (\d+\.\d) % killed", last)
    assert counts is not None, last
    killed, survived = int(counts[1]), int(counts[2])
    assert killed > 0
    assert survived == len(survivors) > 0
    assert float(counts[3]) == pytest.approx(100 * killed / (killed + survived), abs=0.05)
    total = killed + survived
    assert first.startswith(f"memplan/tiny.py: {total} of {total} mutants, judged by tests/test_tiny.py (")
    assert "  survived line 2: return a if a > b else b  ->  return a if a >= b else b" in survivors
    assert "  survived line 6: return a // 2  ->  return a * 2" in survivors
    assert not any("a < b" in line for line in survivors), "which a test notices"
    assert (checkout / "memplan" / "tiny.py").read_text() == MODULE
