"""Measures the seconds of a step of a program, which leaves the user's tensors as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch

from memplan.devices.generators import forked
from memplan.devices.streams import synchronizer
from memplan.runtime.execute.runner import Runner

_LEAST_STEPS, _MOST_STEPS = 2, 100
_SECONDS = 0.5  # of measuring, after the fewest steps


def step_seconds(runner: Runner, example: Sequence[Any]) -> float:
    """Return the seconds of the fastest of several steps on the leaves of a call.

    Parameters' gradients and random states stay as they are; buffers and inputs that the step changes are restored.
    """
    device = runner.traced.device
    wait = synchronizer(device)
    found: list[float] = []
    with torch.inference_mode(False), torch.no_grad(), forked(device), _restored(runner, example) as inputs:
        _step(runner, inputs)  # the first one fills caches
        while len(found) < _LEAST_STEPS or (sum(found) < _SECONDS and len(found) < _MOST_STEPS):
            wait()
            start = perf_counter()
            _step(runner, inputs)
            wait()
            found.append(perf_counter() - start)
    return min(found)


def _step(runner: Runner, inputs: list[torch.Tensor]) -> None:
    """Run forward and backward, with zeros for the gradients that come in."""
    with runner.arena.ownership as ownership:
        ownership.begin(keep=False)
        fresh, saved = runner.forward(*inputs)
        if runner.backward is not None:
            tangents, _ = runner.tangents.of([None] * len(fresh))
            runner.backward(*saved, *tangents)


@contextlib.contextmanager
def _restored(runner: Runner, example: Sequence[Any]) -> Iterator[list[torch.Tensor]]:
    """Yield the inputs of the program for a call.

    Inputs that the program changes are copies, and buffers that it changes are restored.
    """
    traced = runner.traced
    changed = {i for i, binding in enumerate(traced.bindings) if binding.written}
    leaves = runner.input_guards.tensors(list(example))
    inputs = [leaf.clone() if i in changed else leaf for i, leaf in zip(runner.program.inputs, leaves, strict=True)]
    held = runner.written(runner.current())
    before = [tensor.clone() for tensor in held]
    try:
        yield inputs
    finally:
        for tensor, old in zip(held, before, strict=True):
            tensor.copy_(old)
