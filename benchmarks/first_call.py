"""How long the first training step takes: tracing, planning and building included, against torch.compile's backends.

    python -m benchmarks.first_call --contenders aot_eager,memplan

Each measurement has a process of its own, in which the contender has compiled another model before: imports, and what
memplan keeps on disk of its own kernels, are not counted. CPU seconds of all threads, the fastest of `--repeats`.

    python -m benchmarks.first_call --fused --models gpt2,resnet

With Inductor's kernels, by torch.compile and by memplan: two processes for each contender, one after the other, that
share a cache which begins empty. Seconds of CPU are those of the process and of the compilers that it started.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from benchmarks.fused import CONTENDERS as FUSED
from benchmarks.fused import MODELS
from benchmarks.results import Cell, Row, Table, collect, names, parser_of
from benchmarks.runtime import CONTENDERS
from benchmarks.zoo import ZOO, Size

BEFORE = "mlp"  # the model that is compiled before
NOTES = (
    "CPU seconds from the model to the end of the first step, forward and backward, the fastest of the repeats; each in"
    " a process of its own, in which another model was compiled before. Ratio: to the first contender's.",
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    if options.one:
        name, contender = options.one
        print(first_call(name, contender, options.size))
        return 0

    def table(rows: Sequence[Row]) -> Table:
        seconds = {f"{contender}_s": f"{contender}, s" for contender in options.contenders}
        ratios = {contender: f"{contender} / {options.contenders[0]}" for contender in options.contenders[1:]}
        return Table(
            name=options.output,
            title=f"The first step, {options.size} models, cpu",
            columns={"model": "model"} | seconds | ratios,
            rows=rows,
            settings={"size": options.size, "repeats": options.repeats, "threads": 1},
            notes=NOTES,
        )

    return collect(([_row(name, options)] for name in options.models), table, options.directory)


def first_call(name: str, contender: str, size: Size) -> float:
    """CPU seconds of a contender's first step on a model, in a process that may have seen others."""
    torch.set_num_threads(1)
    CONTENDERS[contender](*ZOO[BEFORE]("nano")).run()
    torch._dynamo.reset()
    model, inputs = ZOO[name](size)
    started = time.process_time()
    CONTENDERS[contender](model, inputs).run()
    return time.process_time() - started


def _row(name: str, options: argparse.Namespace) -> dict[str, Cell]:
    print(f"{name} {options.size} ...", file=sys.stderr, flush=True)
    seconds = {contender: _apart(name, contender, options) for contender in options.contenders}
    reference = seconds[options.contenders[0]]
    ratios = {key: taken / reference if taken and reference else None for key, taken in seconds.items()}
    return {"model": name, **{f"{contender}_s": taken for contender, taken in seconds.items()}, **ratios}


def _apart(name: str, contender: str, options: argparse.Namespace) -> float | None:
    """The fastest `first_call` in new processes; None where one fails, as it says on stderr."""
    command = [sys.executable, "-m", "benchmarks.first_call", "--one", name, contender, "--size", options.size]
    seconds = []
    for _ in range(options.repeats):
        run = subprocess.run(command, check=False, capture_output=True, text=True)
        if run.returncode:
            said = [f"exit status {run.returncode}", *run.stderr.strip().splitlines()]
            print(f"{name} {contender}: {said[-1][:300]}", file=sys.stderr, flush=True)
            return None
        seconds.append(float(run.stdout.split()[-1]))
    return min(seconds)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("first_call", "The first step against torch.compile's.", list(ZOO))
    parser.add_argument("--size", choices=["nano", "medium"], default="nano")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--contenders", type=names(list(CONTENDERS)), default=["aot_eager", "memplan"],
        help="comma-separated; the first is the reference",
    )  # fmt: skip
    parser.add_argument("--one", nargs=2, metavar=("MODEL", "CONTENDER"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


COMPARED = ("inductor", "memplan-inductor")
FUSED_COLUMNS = {
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
    FUSED[contender].compile(module, inputs, None)(*inputs).backward()
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


def _fused_table(rows: Sequence[Row], options: argparse.Namespace) -> Table:
    return Table(
        name=options.output,
        title=f"First step with Inductor's kernels, {options.size} models, cpu",
        columns=FUSED_COLUMNS,
        rows=rows,
        settings={"size": options.size, "threads": 1},
        notes=(
            "Ratios are to the same process of inductor. The modules of torch are imported before the clock starts.",
            f"Command: python -m benchmarks.first_call --fused --models {','.join(options.models)} --size"
            f" {options.size}",
        ),
    )


def _batches(options: argparse.Namespace) -> Iterator[list[Row]]:
    for model in options.models:
        yield rows_of(model, options.size)


def fused_main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    parser = parser_of("fused-first-call", "The first step with Inductor's kernels.", list(MODELS), ["gpt2", "resnet"])
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    options = parser.parse_args(arguments)
    return collect(_batches(options), partial(_fused_table, options=options), options.directory)


if __name__ == "__main__":
    fused = sys.argv[1:2] == ["--fused"]
    sys.exit(fused_main(sys.argv[2:]) if fused else main())
