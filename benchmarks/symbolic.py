"""Symbolic plans against planning each shape anew: memory, and what a new shape has to wait for.

    python -m benchmarks.symbolic [--models gpt2 llama ...] [--shapes 5]

Writes benchmarks/results/symbolic.{json,md}. Shapes are spread over the range, ends
included, where the trace covers them. "Arena" columns are in bytes as planned; times are medians of warm calls.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from benchmarks.results import Cell, Table, write
from benchmarks.zoo import ZOO
from memplan.core.plan import Plan
from memplan.symbolic import SymbolicPlan
from memplan.trace import plan_traced, trace
from memplan.trace.dynamic.dims import read_dims
from memplan.trace.dynamic.symbolic import plan_of, trace_symbolic

LONGEST = 64  # positions of the nano language models


def shapes_of(name: str) -> Any:
    """What varies in a model of the zoo: the batch, and of language models the length."""
    batch, seq, source = Dim("batch", min=2, max=64), Dim("seq", min=3, max=LONGEST), Dim("source", min=3, max=LONGEST)
    tokens = {0: batch, 1: seq}
    return {
        "gpt2": (tokens,),
        "llama": (tokens,),
        "bert": (tokens, tokens),
        "t5": ({0: batch, 1: source}, tokens),
    }.get(name, ({0: batch},) * len(ZOO[name]("nano")[1]))


MODELS = ("mlp", "gpt2", "llama", "bert", "t5", "vit", "resnet", "unet")


def inputs_at(model: nn.Module, example: tuple[Any, ...], shapes: Any, values: Mapping[str, int]) -> tuple[Any, ...]:
    """Zeros of the shapes that the example has for other values."""
    leaves = read_dims(model, example, {}, shapes).leaves

    def at(x: torch.Tensor, varying: Mapping[int, Any]) -> torch.Tensor:
        size = [varying[i].at(values[varying[i].symbol]) if i in varying else n for i, n in enumerate(x.shape)]
        return torch.zeros(size, dtype=x.dtype)

    return tuple(map(at, example, leaves))


def spread(plan: SymbolicPlan, count: int) -> list[dict[str, int]]:
    """Values from one end of the ranges to the other, and mixed: small batches of long sequences and the reverse."""
    rows = []
    for k in range(count):
        share = k / (count - 1)
        for mixed in (False, True):
            values = {}
            for i, s in enumerate(plan.symbols):
                at = 1 - share if mixed and i % 2 else share
                values[s.name] = round(s.min * (s.max / s.min) ** at)
            if values not in rows and plan.covers(values):
                rows.append(values)
    return rows


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """Median of `repeat` calls, the first left out."""
    call()
    taken = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def once(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds and result of one call."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def measure(name: str, count: int) -> dict[str, Cell]:
    """One model: trace and plan once, resolve over the range, and plan every one of those shapes anew."""
    model, example = ZOO[name]("nano")
    shapes = shapes_of(name)
    start = _larger(example)
    trace(model, start, train=True)  # imports, caches of torch's
    took, plan = once(lambda: plan_of(trace_symbolic(model, start, {}, dynamic_shapes=shapes, train=True)))
    ratios, anew_seconds, resolve_seconds = [], [], []
    chosen = spread(plan, count)
    for values in chosen:
        inputs = inputs_at(model, start, shapes, values)
        again, concrete = once(partial(_anew, model, inputs))
        plan._resolved.clear()
        waited, resolved = once(partial(plan.resolve, values))
        ratios.append(resolved.arena_size / concrete.arena_size)
        anew_seconds.append(again)
        resolve_seconds.append(waited)
    at_hint = plan.resolve(plan.hint).arena_size / _anew(model, start).arena_size
    return {
        "model": name,
        "ops": len(plan.plan.graph.ops),
        "buffers": len(plan.plan.problem.buffers),
        "sizes": len(plan.sizes.expressions),
        "shapes": len(chosen),
        "at_hint": at_hint,
        "mean": statistics.mean(ratios),
        "worst": max(ratios),
        "resolve_ms": 1e3 * statistics.median(resolve_seconds),
        "symbolic_s": took,
        "anew_s": statistics.median(anew_seconds),
        "speedup": sum(anew_seconds) / (took + sum(resolve_seconds)),
    }


def _larger(example: tuple[Any, ...]) -> tuple[Any, ...]:
    """The example with batches of 4: the zoo's are of 1 or 2."""
    return tuple(torch.zeros((4, *x.shape[1:]), dtype=x.dtype) for x in example)


def _anew(model: nn.Module, inputs: tuple[Any, ...]) -> Plan:
    return plan_traced(trace(model, inputs, train=True))


def main() -> None:
    """Run and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--shapes", type=int, default=5, help="along each way through the range")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in options.models:
        rows.append(measure(name, options.shapes))
        print(rows[-1], flush=True)
    table = Table(
        name="symbolic",
        title="One symbolic plan against a plan for every shape (zoo, nano, forward and backward)",
        columns={
            "model": "model",
            "ops": "ops",
            "buffers": "buffers",
            "sizes": "distinct sizes",
            "shapes": "shapes",
            "at_hint": "arena / anew at the hint",
            "mean": "mean over the range",
            "worst": "worst",
            "resolve_ms": "resolve and validate, ms",
            "symbolic_s": "symbolic plan, s",
            "anew_s": "plan one shape anew, s",
            "speedup": "anew for all shapes / symbolic for all",
        },
        rows=rows,
        settings={"threads": 1, "batch": "2..64", "length": f"3..{LONGEST}"},
        notes=[
            "`resolve` places the buffers for these values, in the order of the plan for the hint; the independent",
            "validator checks that. It is done once for a shape.",
        ],
    )
    print(write(table))


if __name__ == "__main__":
    main()
