"""What a whole training step of a full-size model needs beside parameters and optimizer state: eager against memplan.

    python -m benchmarks.step_memory --models gpt2,bert,resnet

Both run on the CPU at batch 1, with fused AdamW, and torch's profiler says what is allocated and not yet freed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

import memplan
from benchmarks.contenders import Step, eager_step
from benchmarks.full_size import FULL_SIZE, Example
from benchmarks.results import Cell, Row, Table, collect, parser_of
from benchmarks.runtime import WARM_UP, step_peak

COLUMNS = {
    "model": "model",
    "parameters_mb": "parameters, MB",
    "eager_mb": "eager's peak, MB",
    "peak_mb": "memplan's peak, MB",
    "ratio": "memplan's / eager's",
    "max_live_mb": "max live, MB",
    "max_live_ratio": "max live / eager's peak",
    "bound_ratio": "proven bound of any order / eager's peak",
}
NOTES = (
    "Peaks: the arena, and the highest sum of the profiler's memory events within a step that begins without gradients."
    " Parameters, inputs and optimizer state are in none of them. MB = 10^6 bytes.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(options.threads)

    def table(rows: Sequence[Row]) -> Table:
        title = "Memory of a whole step, full-size models, batch 1, cpu"
        settings: dict[str, Cell] = {"threads": options.threads}
        return Table(name=options.output, title=title, columns=COLUMNS, rows=rows, settings=settings, notes=NOTES)

    return collect((_rows(name) for name in options.models), table, options.directory)


def _rows(name: str) -> list[dict[str, Cell]]:
    print(f"{name} ...", file=sys.stderr, flush=True)
    return [row(name, FULL_SIZE[name][0](1)[1])]


def row(name: str, example: Example) -> dict[str, Cell]:
    """One model's figures; `example` is the model, which returns a loss, and its inputs."""
    model, inputs = example
    model.train()
    eager = _peak(eager_step(model, inputs))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = memplan.compile_step(model, optimizer, nn.Identity(), inputs)
    plan = step.plan
    peak = _peak(Step(run=partial(step, *inputs), clear=optimizer.zero_grad, standing=plan.arena_size))
    return {
        "model": name,
        "parameters_mb": sum(p.nbytes for p in model.parameters()) / 1e6,
        "eager_mb": eager / 1e6,
        "peak_mb": peak / 1e6,
        "ratio": peak / eager,
        "max_live_mb": plan.max_live / 1e6,
        "max_live_ratio": plan.max_live / eager,
        "bound_ratio": plan.schedule.bound / eager,
    }


def _peak(step: Step) -> int:
    for _ in range(WARM_UP):
        step.run()
    return step.standing + step_peak(step)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("step_memory", __doc__ or "", list(FULL_SIZE), ["gpt2", "bert", "resnet"])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of torch")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
