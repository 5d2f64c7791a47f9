"""Recompute-only plans against the proven optimum: models of one block, small enough for CP-SAT.

    python -m benchmarks.evict_optimum --work 60

Sizes are those of full models (one layer of each), in bfloat16, traced on fake tensors; nothing is run.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType

import torch

from benchmarks import zoo
from benchmarks.arguments import names, parser_of
from benchmarks.branching import CLASSES, images
from benchmarks.evict import ALIGNMENT, SHARES
from benchmarks.results import Cell, Row, Table, collect
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import DEVICES
from memplan.evict.judge.arrays import measure
from memplan.evict.policies.auto import recompute
from memplan.evict.policies.cpsat import optimum
from memplan.evict.workload import Workload
from memplan.evict.workload_limits import floor
from memplan.planning.fit import make_workload
from memplan.schedule import order
from memplan.trace import trace

COLUMNS = {
    "model": "model",
    "ops": "ops",
    "floor": "floor, %",
    "budget": "budget, %",
    "planned": "memplan, recompute only",
    "best": "CP-SAT's best",
    "bound": "CP-SAT's bound",
    "gap": "gap, points",
    "proven": "proven",
    "planned_s": "memplan, s",
    "cpsat_s": "CP-SAT, s",
}
NOTES = (
    "Overheads in % of the step's time without a budget, by the A100 roofline; -: nothing was found. gap: memplan's"
    " overhead less the best that CP-SAT found; proven: no plan in which each storage has at most two lives is faster"
    " than CP-SAT's best, which started from memplan's.",
)


def gpt2() -> zoo.Example:
    """One layer, batch 8, 1,024 tokens, a small vocabulary (the head would be most of the step)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=1, vocab_size=8192, bos_token_id=0, eos_token_id=0, use_cache=False)
    return zoo.NextToken(GPT2LMHeadModel(config)).eval(), (torch.zeros(8, 1024, dtype=torch.long),)


def vit() -> zoo.Example:
    """One layer, batch 64."""
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(num_hidden_layers=1, num_labels=CLASSES))
    return zoo.Classification(model).eval(), (images(64), torch.zeros(64, dtype=torch.long))


def resnet() -> zoo.Example:
    """Two stages of one basic block, batch 64, batch norm in training mode."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(hidden_sizes=[64, 128], depths=[1, 1], layer_type="basic", num_labels=CLASSES)
    model = ResNetForImageClassification(config)
    return zoo.Classification(model).train(), (images(64), torch.zeros(64, dtype=torch.long))


def mlp() -> zoo.Example:
    """Eight linear layers with GELU."""
    layers = [layer for _ in range(8) for layer in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    return zoo.Regression(torch.nn.Sequential(*layers)), (torch.zeros(8192, 1024), torch.zeros(8192, 1024))


MODELS: Mapping[str, Callable[[], zoo.Example]] = MappingProxyType(
    {"mlp": mlp, "gpt2": gpt2, "vit": vit, "resnet": resnet}
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    logging.disable(logging.WARNING)
    return collect(_rows(options), partial(table_of, options=options), options.directory)


def _rows(options: argparse.Namespace) -> Iterator[list[Row]]:
    for name in options.models:
        workload = workload_of(name)
        for share in options.budgets:
            found = {"model": name, **row(workload, int(share), options.work)}
            print(found, file=sys.stderr, flush=True)
            yield [found]


def table_of(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    """The rows so far."""
    return Table(
        name=options.output,
        title=f"Recompute only, against CP-SAT: {sum(row['proven'] is True for row in rows)} of {len(rows)} proven",
        columns=COLUMNS,
        rows=rows,
        settings={"work": options.work, "costs": "a100", "dtype": "bfloat16"},
        notes=NOTES,
    )


def workload_of(name: str) -> Workload:
    """One model's step, in memplan's order."""
    with torch.device("meta"):
        model, inputs = MODELS[name]()
    inputs = tuple(x.to(torch.bfloat16) if x.is_floating_point() else x for x in inputs)
    graph = trace(model.to(torch.bfloat16), inputs, train=True).graph
    return make_workload(graph, order(graph).order, DEVICES["a100"], ALIGNMENT)


def row(workload: Workload, share: int, work: float) -> dict[str, Cell]:
    """One budget."""
    plain = measure(workload, workload.plain)
    workload = replace(workload, budget=plain.peak * share // 100)
    found: dict[str, Cell] = {
        "ops": len(workload.graph.ops),
        "floor": floor(workload)[0] / plain.peak * 100,
        "budget": share,
        "proven": False,
    }

    def overhead(seconds: float) -> float:
        return (seconds / plain.seconds - 1) * 100

    events = None
    started = time.perf_counter()
    try:
        events = recompute(workload)
        found["planned"] = overhead(measure(workload, events).seconds)
    except BudgetInfeasible:
        pass
    found["planned_s"] = time.perf_counter() - started
    started = time.perf_counter()
    try:
        best = optimum(workload, work=work, hint=events)
        found |= {"best": overhead(best.seconds), "bound": overhead(best.bound), "proven": best.proven}
    except BudgetInfeasible:
        pass
    found["cpsat_s"] = time.perf_counter() - started
    if events is not None and "best" in found:
        found["gap"] = overhead(measure(workload, events).seconds) - overhead(best.seconds)
    return found


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("evict_optimum", "Greedy against proven plans.", list(MODELS))
    parser.add_argument("--budgets", type=names(SHARES), default=["80", "60", "50", "40"], help="percent of the need")
    parser.add_argument("--work", type=float, default=60.0, help="OR-Tools' deterministic time for each")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
