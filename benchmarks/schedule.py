"""Orders of ops: what each policy needs, how good the best is, and what is proven about it.

    python -m benchmarks.schedule --models all --steps inference,training,whole

Figures are max live: bytes of planned storages at the worst step, which the arena reaches. Models are full-size,
traced on fake tensors; nothing is run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.arguments import names, parser_of
from benchmarks.full_size import FULL_SIZE, example
from benchmarks.inductor_orders import bfs, dfs, inductor
from benchmarks.results import Cell, Row, Table, collect
from benchmarks.whole_step import whole_step
from memplan.core.graph import Graph
from memplan.schedule import Schedule, order
from memplan.trace import TracedGraph, trace
from memplan.trace.traced import Source

STEPS = ("inference", "training", "whole")
POLICIES = ("early_free", "late_alloc", "lpmf", "greedy", "reverse_greedy")
COLUMNS = {
    "model": "model",
    "step": "step",
    "batch": "batch",
    "ops": "ops",
    "traced_mb": "traced, MB",
    **{name: f"{name}, %" for name in POLICIES},
    "bfs": "bfs, %",
    "dfs": "dfs, %",
    "inductor": "Inductor's set, %",
    "best": "memplan, %",
    "policy": "by",
    "bound": "bound, %",
    "gap": "gap, %",
    "certified": "certified",
    "evidence": "proven by",
    "seconds": "CPU s",
}
NOTES = (
    "Percentages are changes of max live against the traced order; gap is max live / bound - 1. MB = 10^6 bytes.",
    "inference: forward only. training: forward and backward, parameters' gradients outside (`compile`). whole: with"
    " one update per parameter, gradients planned (as `compile_step`); traced, all updates come last.",
    "unet: Stable Diffusion 1.5's. ddpm: the UNet2DModel of diffusers' example of unconditional training.",
    "In-place reuse is part of every order here: each result takes the bytes of an input that dies at its op in that"
    " order, where the kernel allows it; bounds hold over all orders and all such reuse.",
    "Inductor's set: the best of as-is, lpmf, bfs and dfs, on the same graph. CPU s: the portfolio with its"
    " certificate, kernels compiled before.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    logging.disable(logging.WARNING)
    found = (_rows(name, options) for name in options.models)
    return collect(found, partial(table_of, options=options), options.directory)


def _rows(name: str, options: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    for step, batch, graph in graphs(name, options.steps, options.batches, in_place=options.in_place):
        print(f"{name} {step} {batch}: {len(graph.ops)} ops", file=sys.stderr, flush=True)
        rows.append({"model": name, "step": step, "batch": batch, **measure(graph)})
    return rows


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    certified = sum(row["certified"] is True for row in rows)
    return Table(
        name=options.output,
        title=f"Orders: max live by policy, {certified} of {len(rows)} certified optimal",
        columns=COLUMNS,
        rows=rows,
        settings={"in_place": options.in_place, "dtype": "float32"},
        notes=NOTES,
    )


def graphs(
    name: str, steps: Sequence[str], batches: Sequence[str], *, in_place: bool
) -> Iterator[tuple[str, int, Graph]]:
    """(step, batch, graph) of one model; whole steps are made from the training's trace."""
    for which in batches:
        real = which == "real"
        batch = FULL_SIZE[name][1] if real else 1
        if "inference" in steps:
            model, inputs = example(name, training=False, real_batch=real)
            yield "inference", batch, trace(model, inputs, train=False, in_place=in_place).graph
        if "training" in steps or "whole" in steps:
            model, inputs = example(name, training=True, real_batch=real)
            traced = trace(model, inputs, train=True, in_place=in_place)
            if "training" in steps:
                yield "training", batch, traced.graph
            if "whole" in steps:
                yield "whole", batch, whole_step(traced.graph, parameters(traced))


def parameters(traced: TracedGraph) -> dict[int, int]:
    """Gradient -> parameter, value indices."""
    pairs = zip(traced.results.gradients, traced.results.gradient_of, strict=True)
    bindings = {gradient: traced.bindings[binding] for gradient, binding in pairs}
    return {gradient: b.value for gradient, b in bindings.items() if b.source is Source.PARAMETER}


def measure(graph: Graph) -> dict[str, Cell]:
    """One row: every policy on one graph."""
    before = order(graph, "traced")
    order(graph)
    started = time.process_time()
    best = order(graph)
    seconds = time.process_time() - started
    others = {name: order(graph, name) for name in POLICIES}
    others |= {"bfs": bfs(graph), "dfs": dfs(graph), "inductor": inductor(graph), "best": best}
    return {
        "ops": len(graph.ops),
        "traced_mb": before.max_live / 1e6,
        **{name: _change(schedule.max_live, before) for name, schedule in others.items()},
        "policy": best.policy,
        "bound": _change(best.bound, before),
        "gap": best.gap * 100,
        "certified": best.certified,
        "evidence": best.evidence.value.format(op=best.proof),
        "seconds": seconds,
    }


def _change(size: int, before: Schedule) -> float:
    return (size / before.max_live - 1) * 100 if before.max_live else 0.0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("schedule", "What orders need, and what is proven.", list(FULL_SIZE))
    parser.add_argument("--steps", type=names(STEPS), default=list(STEPS), help="comma-separated, or all")
    parser.add_argument("--batches", type=names(("one", "real")), default=["one", "real"], help="one,real")
    parser.add_argument("--in-place", action=argparse.BooleanOptionalAction, default=True, help="results reuse inputs")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
