"""`memplan fits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import Run

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


@pytest.fixture(autouse=True)
def _model(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(MODEL)


def test_a_model_fits_or_not(run: Run) -> None:
    code, out, err = run("fits", "net.py:net", "--device", "1MiB", "--slack", "0%")
    assert code == 0
    assert "net.py:net (float32, batch 16) fits 1MiB" in out
    assert "largest batch that fits" in out
    assert "tracing" in err  # a line for each stage, without a terminal
    code, out, _ = run("fits", "net.py:any_batch", "--device", "100KiB", "--format", "json", "--batch", "256")
    found = json.loads(out)
    assert (code, found["fits"], found["batch"], found["model"]) == (1, False, 256, "net.py:any_batch")
    need = found["need"]
    beside = max(need["arena"] + need["during"], need["gradients"] + need["kept"] + need["temporaries"])
    assert found["total"] == beside + sum(need[part] for part in ("parameters", "state", "inputs"))
    assert found["smallest"] > 100 << 10
    for named in (("--device", "h100"), ("--target", "sm90:79.1GiB")):
        out = run("fits", "net.py:net", *named, "--infer", "--no-search", "--format", "markdown")[1]
        assert "| context, libraries | 1.00 GiB |" in out
        assert f"kernels are those of {named[1]}" in out
