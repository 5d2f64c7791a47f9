"""Prints predictions of the cost model beside measurements: rows of `results/gpu.json`, planned again without the GPU.

    PYTHONPATH=. python -m benchmarks.predicted --models gpt2,llama1b

Each row of memplan's is planned for the GPU by the costs of its data sheet (`target=`), with the budget that it had.
Overheads are relative to the same function without a budget, in predicted and in measured time. The optimizer, which
runs outside of the plans of `memplan.compile`, is predicted to move its bytes at the memory's bandwidth. `--also
llama1b:memplan+G7.2` plans a budget that was not measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS

TARGETS = {"NVIDIA H200": "h200"}  # what torch calls it -> what memplan does
_MOVED = 7  # bytes that AdamW moves per byte of a parameter: reads it, its gradient and two moments, writes all but one


def rows_of(
    measured: Mapping[str, Any], models: Sequence[str], also: Sequence[str] = ()
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the rows of memplan's in each run of a model, those without a budget first, and what is planned `also`."""
    for run in measured["runs"]:
        for of in run["models"]:
            ours = [r for r in of["rows"] if "ms" in r and _budget(r["contender"]) is not _OTHER]
            if ours and of["model"] in models:
                asked = (pair.partition(":") for pair in also)
                ours += [{"contender": name} for model, _, name in asked if model == of["model"]]
                yield of["model"], sorted(ours, key=lambda r: _budget(r["contender"]) is not None)


_OTHER = "other"


def _budget(contender: str) -> str | None:
    """Return the budget of a contender, None for none, `_OTHER` for what is not planned here."""
    base, *options = contender.split("+")
    if base not in ("memplan", "step") or any(option[0] != "G" for option in options):
        return _OTHER
    return f"{options[0][1:]}GiB" if options else None


def planned(model: str, contender: str, target: str) -> dict[str, Any]:
    """Return the predicted figures of a contender: of the whole step, AdamW and its state included."""
    import torch

    import memplan
    from benchmarks.real_sizes import MODELS
    from memplan.core.gpus import find_gpu
    from memplan.core.units import parse_size
    from memplan.evict.costs import cost_model, simulate

    made, inputs = MODELS[model]("meta")
    asked = _budget(contender)  # there, it did not count the workspaces of cuBLAS, which a plan for a target does
    budget: Any = None if asked is None else parse_size(asked) + find_gpu(target).workspace
    costs = cost_model(target)
    if contender.startswith("step"):
        optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
        plan = memplan.plan_step(made, optimizer, lambda loss: loss, tuple(inputs), target=target, budget=budget)
        beside, held = 0.0, 0
    else:
        plan = memplan.plan(made, tuple(inputs), target=target, budget=budget)
        weights = sum(p.nbytes for p in made.parameters())
        beside, held = _MOVED * weights / costs.bytes_per_second, 2 * weights
    seconds, stall = simulate(plan.graph, costs)
    return {
        "predicted_ms": 1e3 * (seconds + beside),
        "stall_ms": 1e3 * stall,
        "said": 0.0 if plan.eviction is None else plan.eviction.overhead,
        "ops": len(plan.graph.ops),
        "evictions": len(plan.evictions),
        "gb": (plan.total + held) / 1e9,
    }


def compared(measured: Mapping[str, Any], models: Sequence[str], also: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield a row for each measured one: measured and predicted milliseconds and overheads, and their difference."""
    target = TARGETS[measured["device"]]
    for model, rows in rows_of(measured, models, also):
        free: dict[str, dict[str, Any]] = {}
        for row in rows:
            contender = row["contender"]
            print(f"{model} {contender} ...", file=sys.stderr, flush=True)
            found = {"model": model, "contender": contender, **planned(model, contender, target)}
            base = free.setdefault(contender.partition("+")[0], found)
            found["predicted"] = found["predicted_ms"] / base["predicted_ms"] - 1
            if "ms" in row:
                found["ms"] = row["ms"]
                found["measured"] = row["ms"] / base["ms"] - 1
                found["points"] = 100 * (found["predicted"] - found["measured"])
            yield found


def to_markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the table of `compared`."""
    head = ("", "measured ms", "predicted ms", "ratio", "measured overhead", "predicted", "points", "evictions", "ops")
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * (len(head) - 1)}"]
    for r in rows:
        there = "ms" in r
        cells = [f"{r['model']} {r['contender']}", f"{r['ms']:.1f}" if there else "", f"{r['predicted_ms']:.1f}"]
        cells += [f"{r['predicted_ms'] / r['ms']:.2f}", f"{r['measured']:+.1%}"] if there else ["", ""]
        cells += [f"{r['predicted']:+.1%}", f"{r['points']:+.1f}" if there else "", str(r["evictions"]), str(r["ops"])]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Plan, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(prog="benchmarks.predicted", description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=lambda text: text.split(","), default=["gpt2", "llama1b", "bert", "resnet"])
    parser.add_argument("--measured", type=Path, default=RESULTS / "gpu.json", help="rows of benchmarks.gpu")
    parser.add_argument("--also", action="append", default=[], help="one more, not measured: MODEL:CONTENDER")
    parser.add_argument("--output", type=Path, help="JSON file of the rows")
    options = parser.parse_args(arguments)
    rows = list(compared(json.loads(options.measured.read_text(encoding="utf-8")), options.models, options.also))
    if options.output is not None:
        options.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(to_markdown(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
