"""Models that stay on the host: Genoa, Flow and auto at several budgets, predicted and measured on the CPU.

    OMP_NUM_THREADS=1 python -m benchmarks.streamed --models mlp,vit --size medium --rounds 9

Every step is forward and backward with all parameters, inputs, outputs and gradients copied by the plan. The CPU alone
(no device) and all policies take turns; the processor time counts, of the copying threads too, because the machine may
be shared: it shows what copies cost, not what hiding them saves. The predicted seconds count the latter.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter, process_time
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.results import Cell, Row, Table, collect, names, parser_of
from benchmarks.runtime import interleaved
from benchmarks.zoo import ZOO, Size
from memplan.errors import BudgetInfeasible

POLICIES = ("genoa", "flow", "auto")
FLOOR = 0  # a share that stands for the working set of the hungriest op
SHARES = (100, 75, 50, FLOOR)  # % of what copying nothing twice takes
COLUMNS = {
    "model": "model",
    "parameters": "parameters, MiB",
    "budget": "budget, %",
    "policy": "policy",
    "arena": "arena, MiB",
    "loaded": "copied to the device, MiB",
    "predicted_ms": "predicted, ms",
    "stall_ms": "of it waiting, ms",
    "cpu_ms": "processor, ms",
    "wall_ms": "wall clock, ms",
    "ratio": "processor / CPU alone",
}
NOTES = (
    "Forward and backward, one thread, medians of interleaved rounds. `alone`: memplan without a device, which copies"
    " nothing. Predicted with the costs of `cpu` (data-sheet rates, a link of 8 GB/s). Budget 0 is the floor, the"
    " working set of the hungriest op; Genoa needs no more at any budget.",
)
_MIB = 1 << 20


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    found = (measure(name, options.size, options.policies, options.rounds) for name in options.models)
    return collect(found, partial(table_of, options=options), options.directory)


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    return Table(
        name=options.output,
        title=f"Models that stay on the host, {options.size}, two arenas of the CPU",
        columns=COLUMNS,
        rows=rows,
        settings={"rounds": options.rounds, "threads": 1, "size": options.size},
        notes=NOTES,
    )


def measure(name: str, size: Size, policies: Sequence[str], rounds: int) -> list[dict[str, Cell]]:
    """A row for the CPU alone, then one for each budget and policy."""
    model, inputs = ZOO[name](size)
    parameters = sum(p.nbytes for p in model.parameters()) / _MIB
    alone = memplan.compile(model, inputs)
    whole = memplan.plan(model, inputs, device="cpu", policy="flow").arena_size
    floor = memplan.plan(model, inputs, device="cpu", policy="genoa").arena_size
    kept: dict[tuple[int, str], memplan.CompiledModule] = {}
    for share in SHARES:
        for policy in policies:
            if policy == "genoa" and share != FLOOR:
                continue
            budget = max(whole * share // 100, floor)
            try:
                kept[share, policy] = memplan.compile(model, inputs, device="cpu", arena_budget=budget, policy=policy)
            except BudgetInfeasible as error:
                print(f"{name} {share} % {policy}: {error}", file=sys.stderr)
    steps = {"alone": _step(model, alone, inputs)}
    steps |= {f"{share} {policy}": _step(model, compiled, inputs) for (share, policy), compiled in kept.items()}
    walls: dict[str, list[float]] = {key: [] for key in steps}
    times = interleaved({key: _noting(step, walls[key]) for key, step in steps.items()}, rounds)
    base = statistics.median(times["alone"])
    rows: list[dict[str, Cell]] = [
        {
            **dict.fromkeys(COLUMNS),
            **{"model": name, "parameters": parameters, "policy": "alone", "arena": alone.plan.arena_size / _MIB},
            **{"cpu_ms": base * 1e3, "wall_ms": statistics.median(walls["alone"]) * 1e3, "ratio": 1.0},
        }
    ]
    for (share, policy), compiled in kept.items():
        key, eviction = f"{share} {policy}", compiled.plan.eviction
        assert eviction is not None
        rows.append(
            {
                **{"model": name, "parameters": parameters, "budget": share, "policy": policy},
                "arena": compiled.plan.arena_size / _MIB,
                "loaded": sum(e.nbytes for e in compiled.plan.evictions if e.action.value == "offload") / _MIB,
                "predicted_ms": eviction.seconds * 1e3,
                "stall_ms": eviction.stall * 1e3,
                "cpu_ms": statistics.median(times[key]) * 1e3,
                "wall_ms": statistics.median(walls[key]) * 1e3,
                "ratio": statistics.median(t / u for t, u in zip(times[key], times["alone"], strict=True)),
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


_Step = Callable[[], tuple[float, float]]


def _step(model: nn.Module, call: Callable[..., Any], inputs: tuple[Any, ...]) -> _Step:
    """One forward and backward, from empty gradients: seconds of the processor, and of the clock."""

    def run() -> tuple[float, float]:
        for parameter in model.parameters():
            parameter.grad = None
        start, began = process_time(), perf_counter()
        call(*inputs).backward()
        return process_time() - start, perf_counter() - began

    run()
    return run


def _noting(step: _Step, walls: list[float]) -> Callable[[], float]:
    def run() -> float:
        processor, wall = step()
        walls.append(wall)
        return processor

    return run


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("streamed", "Genoa, Flow and auto with device=.", list(ZOO), ["mlp", "vit"])
    parser.add_argument("--size", choices=("nano", "medium"), default="medium")
    parser.add_argument("--policies", type=names(POLICIES), default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
