"""Measured, then guided steps against unmeasured ones, and policies at several budgets: what steps really take.

    OMP_NUM_THREADS=1 python -m benchmarks.adaptive --models gpt2,vit --rounds 9

"Device" and "host" are two arenas on the CPU, with a thread of copies per direction. `links`: a slow link is injected
(each copy sleeps as long as it would take there), and a plan made from the CPU's roofline, which knows nothing of it,
is held against the one that `costs="measure"` ends with. `policies`: the link as it is, each policy's plan at each
budget against the step without evictions. Steps run in turns; ratios are medians of the rounds' own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.arguments import names, parser_of
from benchmarks.results import Cell, Row, Table, collect
from benchmarks.runtime import interleaved
from benchmarks.zoo import ZOO
from memplan.core.evictions import RELOAD, TRANSFERS
from memplan.errors import BudgetInfeasible
from memplan.runtime import CompiledModule
from memplan.runtime.copies.copy_threads import ThreadCopies
from memplan.runtime.profiling.profile_guided import REPLANS, SAMPLES, WARM

COLUMNS = {
    "model": "model",
    "part": "part",
    "link": "link",
    "budget": "budget, %",
    "plan": "plan",
    "arena": "arena / arena without, %",
    "reloads": "reloads",
    "again": "ops run again",
    "plans": "plans measured",
    "ms": "step, ms",
    "stall_ms": "waiting, ms",
    "ratio": "x without a budget",
    "low": "lower quartile",
    "high": "upper quartile",
    "predicted": "predicted x",
}
NOTES = (
    "Forward and backward, one thread of compute, wall time; medians. Ratio: median of per-round ratios to the same"
    " compiled step without a budget. Predicted by the plan from its own costs: the CPU's roofline, or what the first"
    " steps measured. `none`: no evictions. A budget that a policy cannot keep has no row.",
)
LATENCY = 20e-6  # seconds of each injected copy
POLICIES = ("genoa", "flow", "auto")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    torch.set_num_threads(1)
    found = (PARTS[part](name, options) for name in options.models for part in options.parts)
    return collect(found, partial(table_of, options=options), options.directory)


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    return Table(
        name=options.output,
        title=f"Measured and guided steps, and policies at several budgets: {options.size} models, CPU",
        columns=COLUMNS,
        rows=rows,
        settings={
            "rounds": options.rounds,
            "threads": 1,
            "steps measured per plan": WARM + SAMPLES,
            "load average": round(os.getloadavg()[0], 1),
        },
        notes=NOTES,
    )


# -- the parts -------------------------------------------------------------------------------------------


def links(name: str, options: argparse.Namespace) -> list[dict[str, Cell]]:
    """Unmeasured and guided plans under an injected link of so many bytes per second."""
    rows: list[dict[str, Cell]] = []
    for rate in map(float, options.links):
        for share in map(int, options.guided_budgets):
            model, inputs = ZOO[name](options.size)
            steps = {"none": _Step(model, memplan.compile(model, inputs), inputs)}
            for label, policy, costs in (
                ("auto", "auto", None),
                ("auto, guided", "auto", "measure"),
                ("flow", "flow", None),
                ("flow, guided", "flow", "measure"),
            ):
                made = _made(model, inputs, share, policy, costs)
                if made is not None:
                    _inject(made, rate * 1e6)
                    steps[label] = _Step(model, made, inputs)
            rows += _compared(steps, options.rounds, model=name, part="links", link=f"{rate:g} MB/s", budget=share)
    return rows


def policies(name: str, options: argparse.Namespace) -> list[dict[str, Cell]]:
    """Each policy at each budget, with measured costs, over the link as it is."""
    rows: list[dict[str, Cell]] = []
    model, inputs = ZOO[name](options.size)
    costs = memplan.profile(model, inputs, rounds=5)
    for share in map(int, options.budgets):
        steps = {"none": _Step(model, memplan.compile(model, inputs), inputs)}
        for policy in POLICIES:
            made = _made(model, inputs, share, policy, costs)
            if made is not None:
                steps[policy] = _Step(model, made, inputs)
        rows += _compared(steps, options.rounds, model=name, part="policies", link="as it is", budget=share)
    return rows


# What resolving a symbolic plan takes can stand beside these: a function of a model's name and the options -> rows.
PARTS: dict[str, Callable[[str, argparse.Namespace], list[dict[str, Cell]]]] = {"links": links, "policies": policies}


# -- measuring -------------------------------------------------------------------------------------------


class _Step:
    """One forward and backward, from empty gradients; called, it gives seconds, and notes those spent waiting."""

    def __init__(self, model: nn.Module, compiled: CompiledModule, inputs: tuple[Any, ...]) -> None:
        self.model, self.compiled, self.inputs = model, compiled, inputs
        self.stalls: list[float] = []
        self.run()
        for _ in range((REPLANS + 1) * (WARM + SAMPLES)):  # until nothing is measured any more
            if compiled._calls.guide is None:
                break
            self.run()
        self.stalls.clear()

    def run(self) -> float:
        """Seconds of a step."""
        for parameter in self.model.parameters():
            parameter.grad = None
        program = self.compiled._calls.selector.main.program
        before, start = program.stalled, perf_counter()
        self.compiled(*self.inputs).backward()
        taken = perf_counter() - start
        self.stalls.append(program.stalled - before)
        return taken


def _made(model: nn.Module, inputs: tuple[Any, ...], share: int, policy: str, costs: Any) -> CompiledModule | None:
    try:
        return memplan.compile(model, inputs, gradients="safe", arena_budget=share / 100, policy=policy, costs=costs)
    except BudgetInfeasible:
        return None


def _inject(compiled: CompiledModule, rate: float) -> None:
    """Let each copy last as long as a link of `rate` bytes per second takes."""
    copies = compiled._calls.arena.copies
    assert isinstance(copies, ThreadCopies)
    copies.before_each(lambda nbytes: time.sleep(LATENCY + nbytes / rate))


def _compared(steps: dict[str, _Step], rounds: int, **common: Cell) -> list[dict[str, Cell]]:
    """A row for each step, beside what all have in `common`; the first one is what they are compared with."""
    for step in steps.values():
        step.stalls.clear()
    times = interleaved({label: step.run for label, step in steps.items()}, rounds)
    without = steps["none"].compiled.plan.arena_size
    rows: list[dict[str, Cell]] = []
    for label, step in steps.items():
        plan = step.compiled.plan
        ratios = [one / other for one, other in zip(times[label], times["none"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        sources = () if plan.eviction is None else plan.eviction.sources
        ran = [s for s in sources if s >= 0]
        rows.append(
            {
                **common,
                "plan": label,
                "arena": plan.arena_size / without * 100,
                "reloads": sum(op.target == RELOAD for op in plan.graph.ops if op.target in TRANSFERS),
                "again": len(ran) - len(set(ran)),
                "plans": len(step.compiled.measurements),
                "ms": statistics.median(times[label]) * 1e3,
                "stall_ms": statistics.median(step.stalls) * 1e3,
                **{"ratio": middle, "low": low, "high": high},
                "predicted": 1.0 if plan.eviction is None else 1 + plan.eviction.overhead,
            }
        )
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("adaptive", "Guided steps; policies at budgets.", list(ZOO), ["gpt2", "vit"])
    shares = [str(share) for share in range(10, 100)]
    parser.add_argument("--size", default="medium", choices=("nano", "medium"), help="of the models")
    parser.add_argument("--parts", type=names(list(PARTS)), default=list(PARTS), help="of the benchmark")
    parser.add_argument("--links", type=lambda text: text.split(","), default=["1000", "200"], help="MB per second")
    parser.add_argument("--guided-budgets", type=names(shares), default=["60"], help="percent of the need, of links")
    parser.add_argument("--budgets", type=names(shares), default=["80", "60", "40"], help="percent of the need")
    parser.add_argument("--rounds", type=int, default=9, help="samples of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
