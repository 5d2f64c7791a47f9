"""The first step with Inductor's kernels, by torch.compile and by memplan, with empty caches and in a second process.

    python -m benchmarks.fused_first_call --models gpt2,resnet

Each run is a process of its own: two for each contender, one after the other, that share a cache which begins empty.
Seconds of CPU are those of the process and of the compilers that it started, so that they hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.fused import CONTENDERS, MODELS
from benchmarks.results import Row, Table, collect, parser_of

COMPARED = ("inductor", "memplan-inductor")
COLUMNS = {
    "model": "model",
    "contender": "contender",
    "process": "process",
    "wall": "wall s",
    "cpu": "CPU s",
    "wall_ratio": "wall / inductor's",
    "cpu_ratio": "CPU / inductor's",
}


def _run(model: str, size: Any, contender: str, results: Any) -> None:
    """Send the seconds that the first step of a new process takes: by the clock, and of CPU."""
    torch.set_num_threads(1)
    module, inputs = MODELS[model](size)
    import_module("torch._inductor.compile_fx")  # what both need
    before, started = _cpu(), time.perf_counter()
    CONTENDERS[contender].compile(module, inputs, None)(*inputs).backward()
    results.send((time.perf_counter() - started, _cpu() - before))
    results.close()


def _cpu() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _measured(model: str, size: str, contender: str) -> tuple[float, float]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(model, size, contender, theirs))
    process.start()
    theirs.close()
    found: tuple[float, float] = ours.recv()
    process.join()
    return found


def rows_of(model: str, size: str) -> list[Row]:
    """Return the rows of one model."""
    rows: list[Row] = []
    first: dict[str, tuple[float, float]] = {}
    for contender in COMPARED:
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
            for process in ("first", "second"):
                print(f"{model} {contender} {process} ...", file=sys.stderr, flush=True)
                wall, cpu = _measured(model, size, contender)
                first.setdefault(process, (wall, cpu))
                ratios = {"wall_ratio": wall / first[process][0], "cpu_ratio": cpu / first[process][1]}
                rows.append(
                    {"model": model, "contender": contender, "process": process, "wall": wall, "cpu": cpu, **ratios}
                )
    return rows


def _table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    return Table(
        name=options.output,
        title=f"First step with Inductor's kernels, {options.size} models, cpu",
        columns=COLUMNS,
        rows=rows,
        settings={"size": options.size, "threads": 1},
        notes=(
            "Ratios are to the same process of inductor. The modules of torch are imported before the clock starts.",
            f"Command: python -m benchmarks.fused_first_call --models {','.join(options.models)} --size {options.size}",
        ),
    )


def _batches(options: argparse.Namespace) -> Iterator[list[Row]]:
    for model in options.models:
        yield rows_of(model, options.size)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    parser = parser_of("fused-first-call", __doc__.splitlines()[0], list(MODELS), ["gpt2", "resnet"])
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    options = parser.parse_args(arguments)
    return collect(_batches(options), partial(_table, options=options), options.directory)


if __name__ == "__main__":
    sys.exit(main())
