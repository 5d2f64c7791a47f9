"""One rank's memory under FSDP2 and DDP: torch in eager, and compiled steps without a budget and within budgets.

    python -m benchmarks.distributed --ranks 2

Each contender runs on all ranks over gloo, on the CPU with one thread, in processes of its own. What a rank needs is
taken from outside on rank 0: the bytes of all live tensors before a step, and by how much a step exceeds them by the
profiler's memory events. The gathers are those of the plan, and of torch's hooks one for each unit.

    python -m benchmarks.distributed --overlap

predicts the time of one rank's step with and without overlap of its collectives, at several sizes of its arena. A Llama
is planned as rank 0 of 64, without a weight. The time is what the cost model of an H100 with a link between ranks
predicts: collectives of a rank share the link and take it in turn. Nothing has measured it.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS, Cell, Row, Table, collect, parser_of

COLUMNS = {
    "contender": "contender",
    "standing_mb": "before the step, MB",
    "peak_mb": "peak by memory events, MB",
    "ratio": "peak / eager FSDP2's",
    "arena_mb": "arena, MB",
    "total_mb": "plan's total, MB",
    "gathers": "gathers a step",
    "again": "of them again",
    "reductions": "other collectives",
    "loss": "loss after the steps",
}
NOTES = (
    "Peak: the bytes of all live tensors of rank 0 before the step (parts of parameters, optimizer state, batch,"
    " arena), and by how much one step exceeds them, by the profiler's memory events. MB = 10^6 bytes. What gloo copies"
    " (of what is reduced and of what is gathered) is in the peaks, and in the totals from each start to its wait; its"
    " threads free eager's copies late. Eager DDP's buckets, as large as the parameters (5.3 MB), are held by C++ and"
    " not seen. Equal losses are equal bits of the whole training so far.",
    "FSDPMemTracker: the peak that torch's own estimator says of the same eager step, which runs for it. Its"
    " counterpart is the plan's total, which nothing has to run for.",
    "No times: gloo on one machine says nothing of a network. --overlap predicts them.",
)
# name -> (how torch divides the model, options of compile_step; None: torch alone)
CONTENDERS: dict[str, tuple[str, dict[str, Any] | None]] = {
    "eager FSDP2": ("fsdp", None),
    "FSDPMemTracker, of eager FSDP2": ("fsdp tracked", None),
    "eager FSDP2, reshard_after_forward=False": ("fsdp kept", None),
    "memplan, FSDP2": ("fsdp", {}),
    "memplan, FSDP2, budget 70 %": ("fsdp", {"arena_budget": 0.7, "policy": "recompute"}),
    "memplan, FSDP2, budget 50 %": ("fsdp", {"arena_budget": 0.5, "policy": "recompute"}),
    "memplan, FSDP2, budget 25 %": ("fsdp", {"arena_budget": 0.25, "policy": "recompute"}),
    "memplan, FSDP2, budget min": ("fsdp", {"arena_budget": "min", "policy": "recompute"}),
    "eager DDP": ("ddp", None),
    "memplan, DDP": ("ddp", {}),
}
WARM_UP = 3
WIDTH, HEADS, LAYERS, VOCABULARY, ROWS, LENGTH = 128, 4, 6, 512, 2, 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure all contenders and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    if asked.rank_of is not None:
        print(json.dumps(measured(asked.rank_of)))
        return 0

    def table(rows: Sequence[Row]) -> Table:
        eager = next((row["peak_mb"] for row in rows if row["contender"] == "eager FSDP2"), None)
        found = [{**row, "ratio": _ratio(row["peak_mb"], eager)} for row in rows]
        return Table(
            name="distributed",
            title="One rank under FSDP2 and DDP",
            columns=COLUMNS,
            rows=found,
            settings={
                "ranks": asked.ranks,
                "model": f"{LAYERS} transformer layers of width {WIDTH}",
                "batch": f"{ROWS}x{LENGTH} per rank",
                "optimizer": "AdamW, fused",
                "command": f"python -m benchmarks.distributed --ranks {asked.ranks}",
            },
            notes=NOTES,
        )

    return collect(_rows(asked.ranks), table, asked.out)


def _ratio(one: Cell, other: Cell) -> Cell:
    return round(one / other, 3) if isinstance(one, float) and isinstance(other, float) else None


def _rows(ranks: int) -> Iterator[list[Row]]:
    for name in CONTENDERS:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "benchmarks.distributed", "--rank-of", name]
            shared = os.environ | {
                "WORLD_SIZE": str(ranks),
                "OMP_NUM_THREADS": "1",
                "BENCHMARK_RENDEZVOUS": str(Path(folder) / "rendezvous"),
            }
            processes = [
                subprocess.Popen(command, env=shared | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
                for rank in range(ranks)
            ]
            try:
                outputs = [process.communicate(timeout=600)[0] for process in processes]
            finally:
                for process in processes:
                    process.kill()
        if any(process.returncode for process in processes):
            raise RuntimeError(f"{name}: a rank failed")
        yield [{"contender": name, **json.loads(outputs[0].splitlines()[-1])}]


def measured(contender: str) -> dict[str, Cell]:
    """Return what this rank needs, and the collectives of its step; runs on every rank of the group."""
    import torch
    from torch import distributed, nn

    import memplan
    from benchmarks.peak_measure import live_bytes, peak_growth

    distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['BENCHMARK_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    how, options = CONTENDERS[contender]
    model = _divided(how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    generator = torch.Generator().manual_seed(distributed.get_rank())
    x, y = (torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator) for _ in range(2))

    def loss_fn(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def eager() -> torch.Tensor:
        loss = loss_fn(model(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    plan, run = None, eager
    if options is not None:
        step = memplan.compile_step(model, optimizer, loss_fn, (x, y), **options)
        plan = step.plan

        def run() -> torch.Tensor:
            return step(x, y)

    for _ in range(WARM_UP):
        run()
    standing = live_bytes()
    tracked = how == "fsdp tracked"
    grown = 0 if tracked else peak_growth(_Step(run))  # type: ignore[arg-type]
    peak = _tracked(run, model, optimizer, (x, y)) if tracked else standing + grown
    gathers = [] if plan is None else [c for c in plan.collectives if c.gathers]
    found: dict[str, Cell] = {
        "standing_mb": round(standing / 1e6, 3),
        "peak_mb": round(peak / 1e6, 3),
        "arena_mb": None if plan is None else round(plan.arena_size / 1e6, 3),
        "total_mb": None if plan is None else round(plan.total / 1e6, 3),
        "gathers": None if plan is None else len(gathers),
        "again": None if plan is None else sum(c.again for c in gathers),
        "reductions": None if plan is None else len(plan.collectives) - len(gathers),
        "loss": float(run().item()).hex(),
    }
    distributed.destroy_process_group()
    return found


def _tracked(run: Any, model: Any, optimizer: Any, batch: Any) -> int:
    """Return the peak of one eager step in bytes as torch's `FSDPMemTracker` counts it."""
    import torch
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    tracker: Any = FSDPMemTracker(model, optimizer)
    tracker.track_inputs(batch)
    with tracker:
        run()
    return int(tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"])


class _Step:
    """A step as `benchmarks.peak_measure` takes it."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def clear(self) -> None:
        """Do nothing: a step leaves no gradients."""


def _divided(how: str) -> Any:
    """Return the model as torch divides it, or copies it, among the ranks."""
    import torch
    from torch import distributed, nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    options: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options) for _ in range(LAYERS)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
    if how == "ddp":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    again = how != "fsdp kept"
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=again)
    return fully_shard(model, mesh=mesh, reshard_after_forward=again)


RANKS, LENGTH = 64, 2048
BATCHES = (8, 1)  # sequences of each rank: the fewer, the more of the arena are parameters
MODELS: dict[str, dict[str, int]] = {
    "nano": {"layers": 2, "width": 64, "mlp": 172, "heads": 4, "kv": 2, "vocab": 256},
    "500m": {"layers": 6, "width": 2048, "mlp": 8192, "heads": 32, "kv": 8, "vocab": 32000},
}
LINKS = ("nvlink", "400gb", "100gb")
# what the user gives -> options of the plan
OVERLAP_CASES: dict[str, dict[str, Any]] = {
    "one after the other": {"in_flight": 0},
    "no limit of the arena": {"arena_budget": "1TiB"},
    "arena without a budget": {},
    "70 % of the arena, one after the other": {"arena_budget": 0.7, "policy": "recompute", "in_flight": 0},
    "70 % of the arena": {"arena_budget": 0.7, "policy": "recompute"},
    "70 %, 256 MiB in flight": {"arena_budget": 0.7, "policy": "recompute", "in_flight": "256MiB"},
    "30 % of the arena": {"arena_budget": 0.3, "policy": "recompute"},
}
OVERLAP_COLUMNS = {
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
OVERLAP_NOTES = (
    "Predicted by a roofline of the ops and a bandwidth of the link: no GPU has run this.",
    "Reductions on a link of their own: the same plan if a process group for them (torch's"
    " set_separate_reduce_scatter_group) doubled what the network carries: the most that such a group could bring.",
)


def overlap(arguments: list[str] | None = None) -> int:
    parser = parser_of("overlap", "Predicted overlap of collectives.", list(MODELS), ["500m"])
    asked = parser.parse_args(arguments)

    def table(rows: Sequence[Row]) -> Table:
        return Table(
            name=asked.output,
            title="Predicted overlap of collectives",
            columns=OVERLAP_COLUMNS,
            rows=_with_ratios(rows),
            settings={"ranks": RANKS, "tokens of a sequence": LENGTH, "costs": "h100"},
            notes=OVERLAP_NOTES,
        )

    return collect(_batches(asked.models), table, asked.directory)


def _batches(models: Sequence[str]) -> Iterator[list[Row]]:
    """Yield the rows of each model, batch and link."""
    for model, batch, link in product(models, BATCHES, LINKS):
        yield [_overlap_row(model, batch, link, case) for case in OVERLAP_CASES]


def _with_ratios(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their predicted times as shares of those without a limit of the arena."""
    free = {_step_of(r): r["milliseconds"] for r in rows if r["case"] == "no limit of the arena"}
    return [{**r, "ratio": r["milliseconds"] / free[_step_of(r)]} for r in rows]  # type: ignore[operator]


def _step_of(row: Row) -> tuple[Any, ...]:
    return row["model"], row["batch"], row["link"]


def _overlap_row(model: str, batch: int, link: str, case: str) -> Row:
    import torch

    import memplan
    from benchmarks import zoo
    from memplan.core.graph_edit import in_order
    from memplan.evict.costs import cost_model, simulate

    module, inputs = zoo.llama_of(MODELS[model], batch=batch, length=LENGTH)
    costs = cost_model(f"h100/{link}")
    plan = memplan.plan(module.to(torch.bfloat16), inputs, ranks=RANKS, costs=costs, **OVERLAP_CASES[case])
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
    sys.exit(overlap(sys.argv[2:]) if sys.argv[1:2] == ["--overlap"] else main())
