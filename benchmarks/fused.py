"""Inductor's kernels with and without memplan, beside eager and memplan's ATen kernels: time, peak, first call.

    python -m benchmarks.fused --models gpt2,llama --rounds 15

All contenders of a model run in one process, on the CPU with one thread, in turns: the order rotates from round to
round, and a ratio is the median of the ratios of single rounds. Peaks are taken from outside, by memory events. Budgets
are relative to the peak that torch's knob (`activation_memory_budget`) reaches at .5.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn

import memplan
from benchmarks.arguments import parser_of
from benchmarks.peak_contenders import Step
from benchmarks.peak_measure import MODELS, WARM_UP, covered, peak_growth
from benchmarks.results import Row, Table, collect

KNOB = 0.5
TIGHTER = 0.85  # of the peak that the knob reaches
COLUMNS = {
    "model": "model",
    "contender": "contender",
    "ms": "median ms/step",
    "speed": "inductor's time / time",
    "peak_mb": "peak, MB",
    "peak_ratio": "peak / inductor's",
    "budget_mb": "budget, MB",
    "first": "first call / inductor's",
    "bits": "bits",
    "failed": "did not run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """A contender that is ready, and its figures: seconds of the first call, peak in bytes, loss and gradients.

    `budget` is the bytes that it was given.
    """

    step: Step
    first: float
    peak: int
    numbers: tuple[Tensor, ...]
    budget: int | None


Compile = Callable[[nn.Module, tuple[Any, ...], int | None], Callable[..., Any]]


def inductor(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """`torch.compile`."""
    return torch.compile(model, fullgraph=True, dynamic=False)


def partitioned(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """`torch.compile` with `memplan.partitioner`."""
    assert budget is not None
    options: Any = {"custom_partitioner_fn": memplan.partitioner(budget=budget)}
    return torch.compile(model, fullgraph=True, dynamic=False, options=options)


def planned(model: nn.Module, inputs: tuple[Any, ...], budget: int | None, **options: Any) -> Callable[..., Any]:
    """`memplan.compile`."""
    return memplan.compile(model, inputs, **options)


def eager(model: nn.Module, inputs: tuple[Any, ...], budget: int | None) -> Callable[..., Any]:
    """PyTorch as it is."""
    return model


Reference = Literal["inductor", "eager", "inductor-knob"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A way to compile, what its numbers are compared with, its budget as a share of the knob's peak, and the knob."""

    compile: Compile
    against: Reference
    share: float | None = None
    knob: float | None = None


CONTENDERS: Mapping[str, Contender] = MappingProxyType(
    {
        "eager": Contender(compile=eager, against="eager"),
        "inductor": Contender(compile=inductor, against="inductor"),
        "inductor-knob": Contender(compile=inductor, against="inductor", knob=KNOB),
        "inductor+partitioner": Contender(compile=partitioned, against="inductor", share=1.0),
        "inductor+partitioner-tighter": Contender(compile=partitioned, against="inductor", share=TIGHTER),
        "memplan": Contender(compile=planned, against="eager"),
        "memplan-inductor": Contender(compile=partial(planned, kernels="inductor"), against="inductor"),
        "memplan-auto": Contender(compile=partial(planned, kernels="auto"), against="inductor"),
    }
)


def rows_of(model: str, size: str, rounds: int) -> list[Row]:
    """Return the rows of one model, all contenders measured in turns in this process."""
    ready: dict[str, Measured] = {}
    failed: dict[str, str] = {}
    for name, contender in CONTENDERS.items():
        print(f"{model} {name} ...", file=sys.stderr, flush=True)
        knob = ready.get("inductor-knob")
        budget = None if contender.share is None or knob is None else int(contender.share * knob.peak)
        try:
            ready[name] = _ready(contender, model, size, budget)
        except (memplan.MemplanError, TypeError) as error:  # an option that this version does not have is a TypeError
            failed[name] = str(error).splitlines()[0][:160]
    seconds = _in_turns(ready, rounds)
    return [_row(model, name, ready, seconds, failed) for name in CONTENDERS]


def _ready(contender: Contender, model: str, size: Any, budget: int | None) -> Measured:
    """Compile and warm up a contender, and take its figures but for the time."""
    torch._dynamo.reset()
    module, inputs = MODELS[model](size)
    own = copy.deepcopy(module)
    knob = nullcontext() if contender.knob is None else torch._functorch.config.patch(activation_memory_budget=KNOB)
    started = time.perf_counter()
    with knob:
        step = _step(contender.compile(own, inputs, budget), own, inputs)
        step.run()
        first = time.perf_counter() - started
        for _ in range(WARM_UP):
            step.run()
    step.clear()
    tensors = [*own.parameters(), *own.buffers(), *(x for x in inputs if isinstance(x, Tensor))]
    spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]
    standing = covered((start, start + nbytes) for start, nbytes in spans)
    standing += 0 if step.plan is None else step.plan.arena_size
    peak = standing + peak_growth(step)
    torch.manual_seed(7)
    loss = step.run()
    assert isinstance(loss, Tensor)
    numbers = (loss.detach().clone(), *(p.grad.clone() for p in own.parameters() if p.grad is not None))
    return Measured(step=step, first=first, peak=peak, numbers=numbers, budget=budget)


def _step(call: Callable[..., Any], module: nn.Module, inputs: tuple[Any, ...]) -> Step:
    """Return the step: forward and backward from empty gradients."""

    def clear() -> None:
        module.zero_grad()

    def run() -> object:
        clear()
        loss = call(*inputs)
        loss.backward()
        return loss

    return Step(run=run, clear=clear, plan=getattr(call, "plan", None))


def _in_turns(ready: Mapping[str, Measured], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contender in each round."""
    names, found = list(ready), {name: list[float]() for name in ready}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            started = time.perf_counter()
            ready[name].step.run()
            found[name].append(time.perf_counter() - started)
    return found


def _row(
    model: str,
    name: str,
    ready: Mapping[str, Measured],
    seconds: Mapping[str, Sequence[float]],
    failed: Mapping[str, str],
) -> Row:
    """Return the row of one contender."""
    if name not in ready:
        return {**dict.fromkeys(COLUMNS), "model": model, "contender": name, "failed": failed[name]}
    one, base = ready[name], ready.get("inductor")
    other = ready.get(CONTENDERS[name].against)
    return {
        "model": model,
        "contender": name,
        "ms": statistics.median(seconds[name]) * 1e3,
        "speed": statistics.median(a / b for a, b in zip(seconds["inductor"], seconds[name], strict=True))
        if base
        else None,
        "peak_mb": one.peak / 1e6,
        "peak_ratio": one.peak / base.peak if base else None,
        "budget_mb": None if one.budget is None else one.budget / 1e6,
        "first": one.first / base.first if base else None,
        "bits": None if other is None else _bits(one.numbers, other.numbers, CONTENDERS[name].against),
        "failed": None,
    }


def _bits(one: Sequence[Tensor], other: Sequence[Tensor], against: str) -> str:
    """Say whether all numbers are equal, or by how much they differ at most."""
    pairs = list(zip(one, other, strict=True))
    if all(torch.equal(a, b) for a, b in pairs):
        return f"{against}'s"
    return f"{max(float((a - b).abs().max()) for a, b in pairs):.1e} off {against}'s"


def _table(rows: Sequence[Row], output: str, options: argparse.Namespace) -> Table:
    return Table(
        name=output,
        title=f"Fused kernels, {options.size} models, cpu",
        columns=COLUMNS,
        rows=rows,
        settings={"size": options.size, "rounds": options.rounds, "threads": 1},
        notes=(
            "Peak: parameters, buffers, inputs, an arena, and by how much one step exceeds them, by memory events."
            " MB = 10^6 bytes.",
            f"Budgets: {1.0:.0%} and {TIGHTER:.0%} of the peak at activation_memory_budget={KNOB}.",
        ),
    )


def _batches(options: argparse.Namespace) -> Iterator[list[Row]]:
    for model in options.models:
        yield rows_of(model, options.size, options.rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    parser = parser_of("fused", __doc__.splitlines()[0], list(MODELS), ["gpt2", "llama", "bert", "vit", "resnet"])
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return collect(_batches(options), partial(_table, output=options.output, options=options), options.directory)


if __name__ == "__main__":
    sys.exit(main())
