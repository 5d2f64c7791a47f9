"""ExecuTorch's memory planning of exported models: its greedy algorithm beside memplan's solver.

    pip install executorch
    python -m benchmarks.executorch_planning --models all --size medium

The models of the zoo are exported for inference and lowered to ExecuTorch's edge dialect; both algorithms place the
same tensors, with the lifetimes that ExecuTorch gives them. Bytes are what the program states for its planned memory;
max live is the least that any placement of these lifetimes needs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.results import Row, Table, collect, parser_of
from benchmarks.zoo import ZOO
from memplan.integrations.executorch import plan_memory

MODELS = [name for name in ZOO if name not in ("mixtral",)]  # its experts run as a loop over what the router chose
_COLUMNS = {
    "model": "model",
    "tensors": "tensors",
    "live": "max live, bytes",
    "greedy": "ExecuTorch's greedy, bytes",
    "ours": "memplan, bytes",
    "greedy_above": "greedy above max live, %",
    "ours_above": "memplan above max live, %",
    "greedy_s": "greedy, s",
    "ours_s": "memplan, s",
    "failed": "not exported because",
}


@dataclass(slots=True)
class Timed:
    """An algorithm of ExecuTorch's suite that remembers its seconds, its tensors and their max live."""

    algorithm: Callable[..., Any]
    seconds: float = 0.0
    tensors: int = 0
    live: dict[int, int] = field(default_factory=dict)
    __name__: str = "timed"

    def __call__(self, alignment: int, specs: Collection[Any], *rest: Any, **options: Any) -> Any:
        began = time.perf_counter()
        found = self.algorithm(alignment, specs, *rest, **options)
        self.seconds += time.perf_counter() - began
        self.tensors += len(specs)
        for memory in {1 if spec.mem_id is None else spec.mem_id for spec in specs}:
            own = [s for s in specs if (s.mem_id or 1) == memory and getattr(s, "storage_base", None) is None]
            self.live[memory] = self.live.get(memory, 0) + _max_live(own)
        return found


def _max_live(specs: Sequence[Any]) -> int:
    """The most bytes that are alive together; lifetimes are inclusive."""
    changes = sorted(
        change
        for spec in specs
        for change in ((spec.lifetime[0], 1, spec.allocated_memory), (spec.lifetime[1] + 1, 0, -spec.allocated_memory))
    )
    live = most = 0
    for _, _, change in changes:
        live += change
        most = max(most, live)
    return most


def row_of(model: str, size: str) -> Row:
    """The figures of one model."""
    from executorch.exir import ExecutorchBackendConfig, to_edge
    from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, greedy
    from executorch.exir.passes import MemoryPlanningPass

    row: dict[str, str | int | float | bool | None] = {"model": model}
    try:
        module, inputs = ZOO[model](size)  # type: ignore[arg-type]
        with torch.no_grad():
            exported = torch.export.export(module.eval(), tuple(inputs), strict=False)
        for name, algorithm in (("greedy", greedy), ("ours", plan_memory)):
            timed = Timed(algorithm)
            planning = MemoryPlanningPass(memory_planning_algo=MemoryPlanningAlgorithmSuite([timed]))
            program = to_edge(exported).to_executorch(ExecutorchBackendConfig(memory_planning_pass=planning))
            plans = program.executorch_program.execution_plan
            row[name] = sum(sum(plan.non_const_buffer_sizes) for plan in plans)
            row[f"{name}_s"] = round(timed.seconds, 3)
            row["tensors"], row["live"] = timed.tensors, sum(timed.live.values())
    except Exception as error:  # what a model cannot be exported for is told, and the next one is measured
        return {"model": model, "failed": f"{type(error).__name__}: {error}".splitlines()[0][:80].replace("|", "/")}
    live = row["live"]
    assert isinstance(live, int)
    for name in ("greedy", "ours"):
        used = row[name]
        assert isinstance(used, int)
        row[f"{name}_above"] = round(100 * (used / live - 1), 2)
    return row


def table_of(rows: Sequence[Row], size: str, name: str) -> Table:
    """The table of all models so far."""
    from importlib.metadata import version

    return Table(
        name=name,
        title="Memory planning of ExecuTorch: its greedy and memplan's solver",
        columns={key: title for key, title in _COLUMNS.items() if any(row.get(key) is not None for row in rows)},
        rows=rows,
        settings={"executorch": version("executorch"), "size": size, "alignment": 16},
        notes=("Both place the same tensors with the same lifetimes, graph inputs and outputs included.",),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen models and write the table; returns the exit status."""
    parser: argparse.ArgumentParser = parser_of("executorch", "ExecuTorch's memory planning.", MODELS)
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    options = parser.parse_args(arguments)
    batches = ([row_of(model, options.size)] for model in options.models)
    return collect(batches, lambda rows: table_of(rows, options.size, options.output), options.directory)


if __name__ == "__main__":
    sys.exit(main())
