"""Trains a GPT-2 of 124 million parameters for three steps in one planned arena, beside eager on the same seed.

Run by `scripts/demo.sh`; by hand: `python -m scripts.train_step`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.zoo import gpt2_small

STEPS = 3


def train(model: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[list[float], float]:
    """Losses of a few SGD steps, and the milliseconds of the fastest forward + backward."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    torch.manual_seed(0)  # dropout draws the same masks in both runs
    losses: list[float] = []
    fastest = float("inf")
    for _ in range(STEPS):
        started = time.perf_counter()
        loss = call(*inputs)
        loss.backward()
        fastest = min(fastest, time.perf_counter() - started)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, fastest * 1e3


def main() -> None:
    """Print both runs side by side."""
    model, inputs = gpt2_small()
    eager, eager_ms = train(model, model, inputs)
    model, inputs = gpt2_small()
    compiled = memplan.compile(model, inputs)
    planned, planned_ms = train(model, compiled, inputs)
    print(f"\nThree training steps, forward + backward ({torch.get_num_threads()} threads):")
    print(f"  eager    {eager_ms:7.1f} ms   losses {' '.join(f'{loss:.6f}' for loss in eager)}")
    print(f"  memplan  {planned_ms:7.1f} ms   losses {' '.join(f'{loss:.6f}' for loss in planned)}")
    print(f"  arena    {compiled.plan.arena_size / 2**20:7.1f} MiB, allocated once")


if __name__ == "__main__":
    main()
