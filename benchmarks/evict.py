"""Budgets: what keeping them costs in simulated step time: torch's own knob, published policies, memplan.

    python -m benchmarks.evict --models gpt2,vit --budgets 80,50

Models are full-size, traced on fake tensors in bfloat16; nothing is run. Every contender is judged by the same rules
(`memplan.evict.measure.measure`) and the same roofline.

    OMP_NUM_THREADS=1 python -m benchmarks.evict --measured --models gpt2,vit --rounds 20

Recompute plans on the CPU: the step's real time against what the plan predicts. Ops are timed by `memplan.profile`;
then the compiled step without a budget and with one run in turns, and the median of the rounds' own ratios is held
against the predicted one.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import time
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn

import memplan
from benchmarks.full_size import FULL_SIZE, example
from benchmarks.results import Cell, Row, Table, collect, names, parser_of, to_markdown, write
from benchmarks.runtime import interleaved
from benchmarks.torch_budget import TorchPoint, partitions, points_of
from benchmarks.zoo import ZOO
from memplan.core.graph import Graph
from memplan.core.in_place import with_inplace_candidates
from memplan.core.schedule import Schedule
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import DEVICES, CostModel
from memplan.evict.measure import measure
from memplan.evict.policies import fit_policy
from memplan.evict.policies.dtr import dtr
from memplan.evict.workload import Workload, floor
from memplan.planning.budget import plan_within
from memplan.planning.fit import make_workload
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import PlanOptions
from memplan.schedule import order
from memplan.trace import trace_captured
from memplan.trace.capture.joint_graph import capture
from memplan.version import __version__

ALIGNMENT = 512
MODELS = ("gpt2", "bert", "vit", "resnet", "ddpm", "llama", "unet")
WITHOUT_DROPOUT = ("gpt2", "bert")  # in evaluation mode: random ops are never computed again, by any contender
BASELINES = ("dtr", "dtr-addresses", "capuchin", "delta")
PLANNED = ("recompute", "auto")
SHARES = tuple(str(n) for n in range(1, 101))
CONTENDERS = ("torch", "torch-in-place", *BASELINES, *PLANNED)
COLUMNS = {
    "model": "model",
    "ops": "ops",
    "peak_gb": "need, GB",
    "floor": "floor, %",
    "budget": "budget, %",
    "torch": "torch",
    "torch-in-place": "torch, in place",
    "dtr": "DTR",
    "dtr-addresses": "DTR, addresses",
    "capuchin": "Capuchin-like",
    "delta": "DELTA",
    "recompute": "memplan, recompute only",
    "auto": "memplan",
    "recompute_arena": "arena / budget, recompute only",
    "auto_arena": "arena / budget",
    "recompute_s": "planning, recompute only, s",
    "auto_s": "planning, s",
}
NOTES = (
    "Overheads in % of the step's time without a budget; -: it found no way, or none of its points fits. need: bytes"
    " of the arena without a budget, by which budgets are shares; floor: the largest working set of one op.",
    "torch: the cheapest of 15 values of `activation_memory_budget` whose real peak fits; in place: the same with"
    " results in the bytes of dying inputs, which torch does not do without its compiler. The partitioner computes some"
    " ops again that its compiler would fuse away; here they are kernels. Its overhead is against its own step with"
    " nothing computed again.",
    "DTR, Capuchin-like and DELTA are our reading of the papers, on our graph and order. DTR, torch and 'recompute"
    " only' make no copies to the host.",
    "planning: from the ordered graph to placed offsets, oracle and validator included. Rockmate 2.0.0 installs from"
    " PyPI, but cannot be imported: the rkgb 2.0.0 that it needs has no module rkgb.core.",
)


class AddressSpace:
    """`capacity` bytes from address 0, each block at the lowest address where it fits (first-fit)."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: list[tuple[int, int, int]] = []  # (offset, end, key), ascending

    @property
    def offsets(self) -> dict[int, int]:
        """The offset of each key's block."""
        return {key: offset for offset, _, key in self._blocks}

    def take(self, key: int, size: int) -> bool:
        offset = 0
        for start, end, _ in self._blocks:
            if start - offset >= size:
                break
            offset = end
        if offset + size > self.capacity:
            return False
        insort(self._blocks, (offset, offset + size, key))
        return True

    def give(self, key: int) -> None:
        self._blocks = [block for block in self._blocks if block[2] != key]

    def hand_over(self, key: int, to: int) -> None:
        self._blocks = [(a, b, to if k == key else k) for a, b, k in self._blocks]


@dataclass(frozen=True, kw_only=True)
class Question:
    """One model, ordered; `points` are torch's, without and with in-place reuse."""

    name: str
    graph: Graph
    schedule: Schedule
    workload: Workload
    points: dict[str, tuple[TorchPoint, ...]]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    logging.disable(logging.WARNING)
    rows = _earlier(options) if options.keep else {}
    for position, name in enumerate(options.models):
        asked = question(name, DEVICES[options.costs], options.contenders)
        if not position:  # once untimed: the kernels of large graphs are compiled
            planned("auto", asked, measure(asked.workload, asked.workload.plain).peak * 8 // 10)
        for share in options.budgets:
            found = row(asked, int(share), options.contenders)
            rows[name, int(share)] = {**rows.get((name, int(share)), {}), **found}
            print(found, file=sys.stderr, flush=True)
        write(table_of([*rows.values()], options), options.directory)  # after each: the large ones take minutes
    print(to_markdown(table_of([*rows.values()], options)))
    return 0


def _earlier(options: argparse.Namespace) -> dict[tuple[str, int], dict[str, Cell]]:
    """The rows of the last run, by model and budget."""
    path = options.directory / f"{options.output}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {(row["model"], row["budget"]): row for row in rows}


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    kept = [r[key] for r in rows for key in ("recompute_arena", "auto_arena") if r.get(key) is not None]
    within = sum(isinstance(share, float) and share <= 100 for share in kept)
    return Table(
        name=options.output,
        title=f"Budgets: overhead in simulated step time; {within} of {len(kept)} plans within their budget",
        columns=COLUMNS,
        rows=rows,
        settings={"costs": options.costs, "dtype": "bfloat16", "alignment": ALIGNMENT},
        notes=NOTES,
    )


def question(name: str, costs: CostModel, contenders: Sequence[str]) -> Question:
    """Capture a model once, for torch's partitioner and for us."""
    model, inputs = example(name, training=True, real_batch=True)
    model = (model.eval() if name in WITHOUT_DROPOUT else model).to(torch.bfloat16)
    inputs = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs)
    captured = capture(model, inputs, {}, train=True)
    print(f"{name}: captured", file=sys.stderr, flush=True)
    parts = partitions(captured) if {*CONTENDERS[:2]} & {*contenders} else ()
    wanted = [(key, key == "torch-in-place") for key in CONTENDERS[:2] if key in contenders]
    points = {key: points_of(parts, costs, ALIGNMENT, in_place=in_place) for key, in_place in wanted}
    graph = with_inplace_candidates(trace_captured(captured, name).graph)
    schedule = order(graph)
    workload = make_workload(graph, schedule.order, costs, ALIGNMENT)
    print(f"{name}: {len(graph.ops)} ops; torch's points (asked, peak, overhead):", file=sys.stderr)
    need = measure(workload, workload.plain).peak
    for key, found in points.items():
        shown = " ".join(f"{p.asked:g}:{p.peak / need:.1%}:{p.overhead:+.1%}" for p in found)
        print(f"  {key} {shown}", file=sys.stderr, flush=True)
    return Question(name=name, graph=graph, schedule=schedule, workload=workload, points=points)


def row(asked: Question, share: int, contenders: Sequence[str]) -> dict[str, Cell]:
    """All contenders on one budget."""
    plain = measure(asked.workload, asked.workload.plain)
    budget = plain.peak * share // 100
    workload = replace(asked.workload, budget=budget)
    found: dict[str, Cell] = {
        "model": asked.name,
        "ops": len(asked.graph.ops),
        "peak_gb": plain.peak / 1e9,
        "floor": floor(workload)[0] / plain.peak * 100,
        "budget": share,
    }
    for key, points in asked.points.items():
        found[key] = min((p.overhead * 100 for p in points if p.peak <= budget), default=None)
    for name in (name for name in BASELINES if name in contenders):
        found[name] = baseline(name, workload, plain.seconds)
    for name in (name for name in PLANNED if name in contenders):
        found |= planned(name, asked, budget)
    return found


def baseline(name: str, workload: Workload, plain: float) -> float | None:
    """Overhead of a published policy in %; None where it finds no way."""
    try:
        if name == "dtr-addresses":
            events = dtr(workload, memory=AddressSpace(workload.budget))
        else:
            events = fit_policy(name)(workload)
        figures = measure(workload, events)
    except BudgetInfeasible:
        return None
    return (figures.seconds / plain - 1) * 100 if figures.peak <= workload.budget else None


def planned(name: str, asked: Question, budget: int) -> dict[str, Cell]:
    """Overhead, arena and planning time of a whole plan."""
    started = time.perf_counter()
    try:
        plan = plan_within(
            ScheduledGraph(
                model=asked.name,
                graph=asked.graph,
                schedule=asked.schedule,
                alignment=ALIGNMENT,
                versions={"memplan": __version__},
            ),
            PlanOptions(arena_budget=budget, policy=name),
            asked.workload.costs,
        )
    except BudgetInfeasible:
        return {name: None}
    seconds = time.perf_counter() - started
    assert plan.eviction is not None
    return {
        name: plan.eviction.overhead * 100,
        f"{name}_arena": plan.arena_size / budget * 100,
        f"{name}_s": seconds,
    }


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("evict", "What keeping a budget costs.", list(FULL_SIZE), list(MODELS))
    parser.add_argument(
        "--budgets",
        type=names(SHARES),
        default=["80", "60", "50", "40", "30"],
        help="percent of the need",
    )
    parser.add_argument(
        "--contenders", type=names(CONTENDERS), default=list(CONTENDERS), help="comma-separated, or all"
    )
    parser.add_argument("--costs", choices=list(DEVICES), default="a100", help="the roofline")
    parser.add_argument(
        "--keep", action="store_true", help="keep what the last run wrote of other models and contenders"
    )
    return parser.parse_args(arguments)


MEASURED_COLUMNS = {
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
MEASURED_NOTES = (
    "Overhead of the compiled step with a budget over the compiled step without one, forward and backward, one thread,"
    " in processor time; measured: median of per-round ratios. Predicted by the plan from op times that"
    " `memplan.profile` measured.",
)


def measured_main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse_measured(arguments)
    torch.set_num_threads(1)
    found = (measured_rows(name, [int(share) for share in options.budgets], options.rounds) for name in options.models)
    return collect(found, partial(measured_table, options=options), options.directory)


def measured_table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    return Table(
        name=options.output,
        title="Recompute plans: measured against predicted step time, medium models, CPU",
        columns=MEASURED_COLUMNS,
        rows=rows,
        settings={"rounds": options.rounds, "threads": 1},
        notes=MEASURED_NOTES,
    )


def measured_rows(name: str, shares: Sequence[int], rounds: int) -> list[dict[str, Cell]]:
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


def _parse_measured(arguments: Sequence[str] | None) -> argparse.Namespace:
    models = ["gpt2", "vit", "resnet", "llama"]
    parser = parser_of("evict_measured", "Predicted against real step time.", list(ZOO), models)
    parser.add_argument("--budgets", type=names(SHARES), default=["80", "60", "50"], help="percent of the need")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    measured = sys.argv[1:2] == ["--measured"]
    sys.exit(measured_main(sys.argv[2:]) if measured else main())
