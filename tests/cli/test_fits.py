"""`memplan fits`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.cli.helpers import Run
from tests.trace.test_model_config import LLAMA

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
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "max_position_embeddings": 32}))


def test_a_model_fits_or_not(run: Run) -> None:
    code, out, err = run("fits", "net.py:net", "--device", "1MiB", "--slack", "0%")
    assert code == 0
    assert "net.py:net (float32, batch 16) fits 1MiB" in out
    assert "largest batch that fits" in out
    assert "tracing" in err  # a line for each stage, without a terminal
    code, out, _ = run("fits", "net.py:any_batch", "--device", "100KiB", "--format", "json", "--batch", "256")
    found = json.loads(out)
    assert (code, found["fits"], found["batch"], found["model"]) == (1, False, 256, "net.py:any_batch")
    assert found["total"] == found["need"]["arena"] + sum(
        found["need"][part] for part in ("parameters", "state", "inputs")
    ) + max(found["need"]["during"], found["need"]["kept"] + found["need"]["temporaries"])
    assert {remedy["how"] for remedy in found["remedies"]} == {"foreach=False", "budget", "bfloat16"}
    out = run("fits", "net.py:net", "--device", "h100", "--infer", "--no-search", "--format", "markdown")[1]
    assert "| context, libraries | 1.00 GiB |" in out


def test_a_configuration(run: Run) -> None:
    options = ("--device", "l4", "--batch", "2", "--sequence", "16", "--no-search", "--format", "json")
    code, out, _ = run("fits", "--hf", "config.json", "--optimizer", "sgd", *options)
    found = json.loads(out)
    assert (code, found["batch"], found["optimizer"], found["dtypes"]) == (0, 2, "SGD", ["bfloat16"])
    assert found["model"] == "LlamaForCausalLM, 16 tokens"
    assert found["need"]["state"] == 0


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (("--device", "h100"), "names no model"),
        (("net.py:net", "--hf", "config.json", "--device", "h100"), "names two models"),
        (("net.py:net", "--sequence", "4", "--device", "h100"), "are for --hf"),
        (("net.py:net", "--device", "tpu-v9"), "choose one of"),
        (("net.py:net", "--device", "h100", "--slack", "most"), "slack"),
        (("net.py:breaks", "--device", "h100"), "no batch of 4"),
        (("net.py", "--device", "h100"), "FACTORY"),
        (("--hf", "net.py", "--device", "h100"), "is not JSON"),
        (("net.py:net", "--device", "h100", "--optimizer", "Adman"), "torch.optim has no"),
        (("net.py:net", "--device", "h100", "--costs", "abacus"), "abacus"),
        (("net.py:any_batch", "--device", "h100", "--batch", "0"), "--batch"),
    ],
)
def test_bad_input(run: Run, arguments: tuple[str, ...], what: str) -> None:
    code, out, err = run("fits", *arguments)
    assert (code, out) == (2, "")
    assert what in err
