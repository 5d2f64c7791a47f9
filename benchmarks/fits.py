"""Compares what `memplan.fits` predicts with the measured peak of training on the CPU.

    python -m benchmarks.fits --models all --size nano

Each model is trained in a process of its own: `memplan.compile` and AdamW, and eager and AdamW. The peak is the highest
sum of memory events in the third training step, gradients empty at its beginning, beside what is alive before it: all
storages of tensors that Python holds. Nothing asks memplan for it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

import memplan
from benchmarks.peak_measure import Step, live_bytes, peak_growth
from benchmarks.results import Row, Table, collect, parser_of
from benchmarks.zoo import ZOO

_ROOT = Path(__file__).parent.parent
_STEPS = 2  # before the one that is measured


def measured(model: str, size: str, contender: str) -> Row:
    """Return the predicted and the measured bytes of one model, trained by memplan or eagerly.

    Args:
        model: A name in the zoo.
        size: "nano" or "medium".
        contender: "memplan" or "eager".
    """
    torch.set_num_threads(1)
    module, inputs = ZOO[model](size)  # type: ignore[arg-type]
    answer = memplan.fits(module, inputs, target="cpu", allowance=0, search=False)
    call = memplan.compile(module, inputs) if contender == "memplan" else module
    optimizer = torch.optim.AdamW(module.parameters())
    predicted = answer.total if contender == "memplan" else answer.eager
    del answer

    def run() -> None:
        """One training step."""
        call(*inputs).backward()
        optimizer.step()

    step = Step(run=run, clear=lambda: optimizer.zero_grad(set_to_none=True))
    for _ in range(_STEPS):
        step.clear()
        step.run()
    step.clear()
    standing = live_bytes()
    return {"predicted": predicted, "measured": standing + peak_growth(step)}


def measured_apart(model: str, size: str, contender: str) -> dict[str, int]:
    """Return what `measured` returns in a process of its own, in which nothing else is alive.

    Args:
        model: A name in the zoo.
        size: "nano" or "medium".
        contender: "memplan" or "eager".
    """
    command = [sys.executable, "-m", "benchmarks.fits", "--one", model, "--size", size, "--contender", contender]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env, cwd=_ROOT)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def row_of(model: str, size: str) -> Row:
    """Return the figures of one model, each contender measured in a process of its own.

    Args:
        model: A name in the zoo.
        size: "nano" or "medium".
    """
    row: dict[str, str | int | float | bool | None] = {"model": model}
    for contender in ("memplan", "eager"):
        found = measured_apart(model, size, contender)
        row[f"{contender}_predicted"] = round(found["predicted"] / 2**20, 3)
        row[f"{contender}_measured"] = round(found["measured"] / 2**20, 3)
        row[f"{contender}_ratio"] = round(found["predicted"] / found["measured"], 4)
        row[f"{contender}_short"] = max(found["measured"] - found["predicted"], 0)
    return row


def table_of(rows: Sequence[Row], size: str) -> Table:
    """Return the table of all models measured so far.

    Args:
        rows: The results of `row_of`.
        size: "nano" or "medium".
    """
    columns = {"model": "model"}
    for contender in ("memplan", "eager"):
        columns[f"{contender}_predicted"] = f"{contender}: predicted MiB"
        columns[f"{contender}_measured"] = "measured MiB"
        columns[f"{contender}_ratio"] = "predicted / measured"
        columns[f"{contender}_short"] = "short, bytes"
    return Table(
        name=f"fits-{size}",
        title="Predicted and measured peaks of training with AdamW on the CPU",
        columns=columns,
        rows=rows,
        settings={"command": f"python -m benchmarks.fits --models all --size {size}", "device": "cpu", "threads": 1},
        notes=("Short: the bytes that the step needed beyond the prediction; 0 where it needed no more.",),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen models and write the table; returns the exit status."""
    parser: argparse.ArgumentParser = parser_of("fits", "Predicted peaks beside measured ones.", list(ZOO))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--one", choices=list(ZOO), help="measure one model in this process, and print its bytes")
    parser.add_argument("--contender", choices=["memplan", "eager"], default="memplan")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measured(options.one, options.size, options.contender)))
        return 0
    batches = ([row_of(model, options.size)] for model in options.models)
    return collect(batches, lambda rows: table_of(rows, options.size), options.directory)


if __name__ == "__main__":
    sys.exit(main())
