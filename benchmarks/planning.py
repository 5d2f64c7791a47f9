"""Measures the seconds and the memory of planning itself, for Llamas of 1, 7 and 70 billion parameters.

    python -m benchmarks.planning --models 7b,70b

Nothing is launched and no weight exists: models are on the meta device, in bfloat16. Each plan is made in a process of
its own with one thread; its seconds (of the CPU: other programs on the machine do not count) and its largest resident
set are what the system says of that process when it has ended, so importing torch and tracing are in them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from benchmarks.results import Row, Table, collect, parser_of

LENGTH = 2048  # tokens
_COSTS = "h100"

# model -> (dimensions, sequences without ranks)
DIMENSIONS: Mapping[str, tuple[Mapping[str, int], int]] = MappingProxyType(
    {
        "nano": ({"layers": 2, "width": 64, "mlp": 172, "heads": 4, "kv": 2, "vocab": 256}, 1),
        "1b": ({"layers": 16, "width": 2048, "mlp": 8192, "heads": 32, "kv": 8, "vocab": 128256}, 4),
        "7b": ({"layers": 32, "width": 4096, "mlp": 11008, "heads": 32, "kv": 32, "vocab": 32000}, 4),
        "70b": ({"layers": 80, "width": 8192, "mlp": 28672, "heads": 64, "kv": 8, "vocab": 32000}, 8),
    }
)
# (ranks, budget, policy); a budget in bytes is for 64 ranks
CASES: tuple[tuple[int, str, str], ...] = (
    (1, "", "auto"),
    (1, "0.6", "recompute"),
    (1, "0.6", "auto"),
    (64, "8GiB", "recompute"),
    (1, "min", "recompute"),
    (64, "8GiB", "auto"),
)


def main(arguments: list[str] | None = None) -> int:
    parser = parser_of("planning", __doc__.splitlines()[0], list(DIMENSIONS), ["1b", "7b", "70b"])
    parser.add_argument("--cases", default="", help="numbers of cases, comma-separated; default: all")
    asked = parser.parse_args(arguments)
    cases = [CASES[int(i)] for i in asked.cases.split(",")] if asked.cases else list(CASES)

    def table(rows: Sequence[Row]) -> Table:
        return Table(
            name=asked.output,
            title="Planning time and memory",
            columns=COLUMNS,
            rows=rows,
            settings={"command": f"python -m benchmarks.planning --models {','.join(asked.models)}", "costs": _COSTS},
            notes=NOTES,
        )

    return collect(_batches(asked.models, cases), table, asked.directory)


COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "model": "model",
        "ranks": "ranks",
        "batch": "sequences",
        "budget": "budget",
        "policy": "policy",
        "cpu": "planning, CPU seconds",
        "wall": "wall seconds",
        "resident": "largest resident set, GiB",
        "ops": "ops of the plan",
        "total": "predicted total, GiB",
        "slower": "predicted time, % more",
        "gathers": "gathers a step",
        "status": "placement",
    }
)
NOTES = (
    "The seconds and the resident set are of the whole process: Python, torch and transformers are imported (0.4 GiB),"
    " the model is traced, ordered, evicted, placed and validated. Wall seconds depend on what else the machine does.",
)


def _batches(models: list[str], cases: list[tuple[int, str, str]]) -> Iterator[list[Row]]:
    """Yield one row for each plan."""
    for model in models:
        for ranks, budget, policy in cases:
            yield [measured(model, ranks, budget, policy)]


def measured(model: str, ranks: int, budget: str, policy: str) -> Row:
    """Return the row of one plan, which a fresh process makes."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.planning", "--plan", model, str(ranks), budget, policy]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    began = time.perf_counter()
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:  # not run(): wait4
        assert process.stdout is not None
        printed = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return {
        "model": model,
        "ranks": ranks,
        "batch": _batch(model, ranks),
        "budget": budget or "none",
        "policy": policy,
        "cpu": used.ru_utime + used.ru_stime,
        "wall": time.perf_counter() - began,
        "resident": used.ru_maxrss / 2**20,
        **json.loads(printed),
    }


def _batch(model: str, ranks: int) -> int:
    return DIMENSIONS[model][1] if ranks == 1 else 1


def plan(model: str, ranks: int, budget: str, policy: str) -> dict[str, Any]:
    """Plan one step in this process, and return its figures."""
    import torch

    import memplan
    from benchmarks import zoo

    dimensions, _ = DIMENSIONS[model]
    module, inputs = zoo.llama_of(dimensions, batch=_batch(model, ranks), length=LENGTH)
    made = memplan.plan(
        module.to(torch.bfloat16),
        inputs,
        ranks=ranks if ranks > 1 else None,
        budget=float(budget) if budget.startswith("0.") else budget or None,
        policy=policy,
        costs=_COSTS,
    )
    kept = made.eviction
    return {
        "ops": len(made.graph.ops),
        "total": made.total / 2**30,
        "gathers": sum(c.gathers for c in made.collectives) or None,
        "slower": 100 * (kept.seconds / kept.base_seconds - 1) if kept else 0.0,
        "status": made.solution.status.name.lower(),
    }


if __name__ == "__main__":
    if sys.argv[1:2] == ["--plan"]:
        name, count, limit, way = sys.argv[2:]
        print(json.dumps(plan(name, int(count), limit, way)))
        raise SystemExit(0)
    raise SystemExit(main())
