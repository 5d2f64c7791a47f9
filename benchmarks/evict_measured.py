"""Recompute plans on the CPU: the step's real time against what the plan predicts.

    OMP_NUM_THREADS=1 python -m benchmarks.evict_measured --models gpt2,vit --rounds 20

Ops are timed by `memplan.profile`; then the compiled step without a budget and with one run in turns, and the median
of the rounds' own ratios is held against the predicted one.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.evict import SHARES
from benchmarks.results import Cell, Row, Table, collect, names, parser_of
from benchmarks.runtime import interleaved
from benchmarks.zoo import ZOO

COLUMNS = {
    "model": "model",
    "budget": "budget, %",
    "arena": "arena / arena without, %",
    "recomputed": "ops run again",
    "plain_ms": "without, ms",
    "kept_ms": "with, ms",
    "predicted": "predicted overhead, %",
    "measured": "measured, %",
    "low": "lower quartile",
    "high": "upper quartile",
    "difference": "measured - predicted, points",
}
NOTES = (
    "Overhead of the compiled step with a budget over the compiled step without one, forward and backward, one thread,"
    " in processor time; measured: median of per-round ratios. Predicted by the plan from op times that"
    " `memplan.profile` measured.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    found = (measure(name, [int(share) for share in options.budgets], options.rounds) for name in options.models)
    return collect(found, partial(table_of, options=options), options.directory)


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    return Table(
        name=options.output,
        title="Recompute plans: measured against predicted step time, medium models, CPU",
        columns=COLUMNS,
        rows=rows,
        settings={"rounds": options.rounds, "threads": 1},
        notes=NOTES,
    )


def measure(name: str, shares: Sequence[int], rounds: int) -> list[dict[str, Cell]]:
    """A row for each budget of one model."""
    model, inputs = ZOO[name]("medium")
    costs = memplan.profile(model, inputs, rounds=9)
    plain = memplan.compile(model, inputs)
    kept = {
        share: memplan.compile(model, inputs, arena_budget=share / 100, policy="recompute", costs=costs)
        for share in shares
    }
    steps = {"plain": _step(model, plain, inputs)}
    steps |= {str(share): _step(model, compiled, inputs) for share, compiled in kept.items()}
    for step in steps.values():
        step()
    times = interleaved(steps, rounds)
    rows: list[dict[str, Cell]] = []
    for share, compiled in kept.items():
        ratios = [with_ / without for without, with_ in zip(times["plain"], times[str(share)], strict=True)]
        low, middle, high = ((ratio - 1) * 100 for ratio in statistics.quantiles(ratios, n=4))
        eviction = compiled.plan.eviction
        assert eviction is not None
        predicted = eviction.overhead * 100
        rows.append(
            {
                "model": name,
                "budget": share,
                "arena": compiled.plan.arena_size / plain.plan.arena_size * 100,
                "recomputed": len(eviction.sources) - len(set(eviction.sources)),
                "plain_ms": statistics.median(times["plain"]) * 1e3,
                "kept_ms": statistics.median(times[str(share)]) * 1e3,
                "predicted": predicted,
                "measured": middle,
                "low": low,
                "high": high,
                "difference": middle - predicted,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _step(model: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> Callable[[], float]:
    """One forward and backward, from empty gradients: seconds of the processor, whatever else runs on the machine."""

    def run() -> float:
        for parameter in model.parameters():
            parameter.grad = None
        start = process_time()
        call(*inputs).backward()
        return process_time() - start

    return run


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    models = ["gpt2", "vit", "resnet", "llama"]
    parser = parser_of("evict_measured", "Predicted against real step time.", list(ZOO), models)
    parser.add_argument("--budgets", type=names(SHARES), default=["80", "60", "50"], help="percent of the need")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
