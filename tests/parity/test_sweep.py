"""A fixed part of the sweep (one case of 1000), and what happens when a worker does not come back."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.parity import catalog, refusals
from tests.parity.cases import Selection, cases_of
from tests.parity.sweep import sweep
from tests.parity.verdicts import Result, Verdict
from tests.slow import slow


@pytest.mark.parametrize("every", [1000, slow(250)])
def test_a_fixed_part(every: int) -> None:
    verdicts = list(sweep(Selection(every=every)))
    assert len(verdicts) > 10, "the databases were found"
    assert sum(v.result is Result.PASSED for v in verdicts) > len(verdicts) // 2
    found = refusals.findings(verdicts, refusals.expected(), refusals.expected(refusals.ROUNDINGS))
    assert not found, "\n".join(found)


_PREAMBLE = """
import json, os, sys, time
task = json.loads(sys.stdin.readline())
def say(**message):
    print(json.dumps(message), flush=True)
def passes(name):
    say(begins=name)
    say(verdict={"case": name, "result": "passed", "reason": "", "seconds": 0.1})
for name in ("a|1", "a|2", "a|3"):
    if name in task["done"]:
        continue
"""


def _verdicts(body: str, tmp_path: Path) -> Iterator[Verdict]:
    script = tmp_path / "worker.py"
    script.write_text(f"{_PREAMBLE}{body}\nsay(again=False)\n")
    return sweep(Selection(), seconds=1, worker=(sys.executable, str(script)))


def test_a_crash_costs_one_case(tmp_path: Path) -> None:
    body = """
    if name == "a|2":
        say(begins=name)
        os.abort()
    passes(name)
"""
    verdicts = list(_verdicts(body, tmp_path))
    assert [(v.case, v.result) for v in verdicts] == [
        ("a|1", Result.PASSED),
        ("a|2", Result.CRASHED),
        ("a|3", Result.PASSED),
    ]
    assert "SIGABRT" in verdicts[1].reason


def _entry(name: str = "entry") -> catalog.Entry:
    import torch

    def samples(dtype: torch.dtype) -> Iterator[catalog.Sample]:
        for shape in ((2, 3), (4, 4), (1,), (2, 2)):
            yield catalog.Sample(make=lambda: torch.sin, args=(torch.randn(shape, dtype=dtype),), kwargs={})

    return catalog.Entry(name=name, dtypes=("float32",), read=samples)


def test_cases_of_an_entry() -> None:
    names = [c.variant for c in cases_of(_entry())]
    assert len(names) == 3 * 3 + 3  # no channels in two dimensions
    assert {"float32/largest/between/dense", "float32/small/raw/dense", "float32/largest/plain/window"} <= set(names)
