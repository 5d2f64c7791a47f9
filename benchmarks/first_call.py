"""How long the first training step takes: tracing, planning and building included, against torch.compile's backends.

    python -m benchmarks.first_call --contenders aot_eager,memplan

Each measurement has a process of its own, in which the contender has compiled another model before: imports, and what
memplan keeps on disk of its own kernels, are not counted. CPU seconds of all threads, the fastest of `--repeats`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence

import torch

from benchmarks.contenders import CONTENDERS
from benchmarks.results import Cell, Row, Table, collect, names, parser_of
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


if __name__ == "__main__":
    sys.exit(main())
