"""Predicts the time of one rank's step with and without overlap of its collectives, at several sizes of its arena.

    python -m benchmarks.overlap

A Llama is planned as rank 0 of 64, without a weight. The time is what the cost model of an H100 with a link between
ranks predicts: collectives of a rank share the link and take it in turn. Nothing has measured it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from benchmarks.results import Row, Table, collect, parser_of

RANKS, LENGTH = 64, 2048
BATCHES = (8, 1)  # sequences of each rank: the fewer, the more of the arena are parameters
MODELS: dict[str, dict[str, int]] = {
    "nano": {"layers": 2, "width": 64, "mlp": 172, "heads": 4, "kv": 2, "vocab": 256},
    "500m": {"layers": 6, "width": 2048, "mlp": 8192, "heads": 32, "kv": 8, "vocab": 32000},
}
LINKS = ("nvlink", "400gb", "100gb")
# what the user gives -> options of the plan
CASES: dict[str, dict[str, Any]] = {
    "one after the other": {"in_flight": 0},
    "no limit of the arena": {"arena_budget": "1TiB"},
    "arena without a budget": {},
    "70 % of the arena, one after the other": {"arena_budget": 0.7, "policy": "recompute", "in_flight": 0},
    "70 % of the arena": {"arena_budget": 0.7, "policy": "recompute"},
    "70 %, 256 MiB in flight": {"arena_budget": 0.7, "policy": "recompute", "in_flight": "256MiB"},
    "30 % of the arena": {"arena_budget": 0.3, "policy": "recompute"},
}
COLUMNS = {
    "model": "model",
    "batch": "sequences",
    "link": "link",
    "case": "case",
    "arena": "arena, GiB",
    "gathers": "gathers",
    "again": "of them again",
    "others": "other collectives",
    "early": "collectives that overlap",
    "milliseconds": "predicted, ms",
    "ratio": "to no limit of the arena",
    "apart": "reductions on a link of their own, ms",
}
NOTES = (
    "Predicted by a roofline of the ops and a bandwidth of the link: no GPU has run this.",
    "Reductions on a link of their own: the same plan if a process group for them (torch's"
    " set_separate_reduce_scatter_group) doubled what the network carries: the most that such a group could bring.",
)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("overlap", __doc__.splitlines()[0], list(MODELS), ["500m"])
    asked = parser.parse_args(arguments)

    def table(rows: Sequence[Row]) -> Table:
        return Table(
            name=asked.output,
            title="Predicted overlap of collectives",
            columns=COLUMNS,
            rows=_with_ratios(rows),
            settings={"ranks": RANKS, "tokens of a sequence": LENGTH, "costs": "h100"},
            notes=NOTES,
        )

    return collect(_batches(asked.models), table, asked.directory)


def _batches(models: Sequence[str]) -> Iterator[list[Row]]:
    """Yield the rows of each model, batch and link."""
    for model, batch, link in product(models, BATCHES, LINKS):
        yield [_row(model, batch, link, case) for case in CASES]


def _with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their predicted times as shares of those without a limit of the arena."""
    free = {_step_of(r): r["milliseconds"] for r in rows if r["case"] == "no limit of the arena"}
    return [{**r, "ratio": r["milliseconds"] / free[_step_of(r)]} for r in rows]  # type: ignore[operator]


def _step_of(row: Row) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["link"]


def _row(model: str, batch: int, link: str, case: str) -> Row:
    import torch

    import memplan
    from benchmarks import zoo
    from memplan.evict.costs import cost_model, simulate
    from memplan.evict.workload import in_order

    module, inputs = zoo.llama_of(MODELS[model], batch=batch, length=LENGTH)
    costs = cost_model(f"h100/{link}")
    plan = memplan.plan(module.to(torch.bfloat16), inputs, ranks=RANKS, costs=costs, **CASES[case])
    gathers = [c for c in plan.collectives if c.gathers]
    graph = in_order(plan.graph, plan.schedule.order)
    apart = replace(graph, ops=tuple(_in_group_of_its_kind(op) for op in graph.ops))
    (seconds, _), (least, _) = simulate(graph, costs), simulate(apart, costs, one_link=False)
    return {
        "model": model,
        "batch": batch,
        "link": link,
        "case": case,
        "arena": plan.arena_size / 2**30,
        "gathers": len(gathers),
        "again": sum(c.again for c in gathers),
        "others": len(plan.collectives) - len(gathers),
        "early": sum(c.early for c in plan.collectives),
        "milliseconds": 1e3 * seconds,
        "apart": 1e3 * least,
    }


def _in_group_of_its_kind(op: Any) -> Any:
    """Return an op in a process group of its own if it is a reduction."""
    from memplan.core.collectives import is_collective, may_run_again

    reduces = is_collective(op.target) and not may_run_again(op.target)
    return replace(op, group="reductions") if reduces else op


if __name__ == "__main__":
    sys.exit(main())
