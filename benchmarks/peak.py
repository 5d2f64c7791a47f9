"""The peak of a step as its users measure it: memplan, eager, Inductor, with checkpoints and budgets.

    python -m benchmarks.peak --size medium --contenders eager,eager+checkpoint,inductor,memplan

Each figure is taken from outside (`benchmarks.peak_measure`), in a process of its own, on the CPU with one thread:
by memory events, and, in another process, by the growth of the resident set. Below the table stand the geometric means
over the models, and each promise of memplan that a measurement breaks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import geometric_mean

from benchmarks.arguments import names, parser_of
from benchmarks.peak_contenders import CONTENDERS
from benchmarks.peak_measure import METHODS, MODELS, RETURN_MEMORY
from benchmarks.results import Cell, Row, Table, collect

REFERENCE = "eager"
REFERENCES = (REFERENCE, "eager-step")  # what the rows after it are compared with
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
COLUMNS = {
    "model": "model",
    "contender": "contender",
    "ms": "median ms/step",
    "time_ratio": "time / eager's",
    "standing_mb": "before the step, MB",
    "peak_mb": "peak by memory events, MB",
    "ratio": "peak / eager's",
    "resident_mb": "peak by resident set, MB",
    "resident_ratio": "resident peak / eager's",
    "total_mb": "memplan's total, MB",
    "of_total": "peak / total",
    "budget_mb": "budget, MB",
    "of_budget": "peak / budget",
    "how": "how blocks are checkpointed",
    "failed": "did not run",
}
NOTES = (
    "Peak: the bytes of all tensors that are alive before the step (parameters, buffers, inputs, and what the contender"
    " keeps between steps), and by how much one step exceeds them: by the profiler's memory events, and, in another"
    " process, by the high-water mark of the resident set. MB = 10^6 bytes. Steps begin without gradients.",
    "Times are medians of single processes, not interleaved.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings that every measurement of a table shares. `seconds` limits each process."""

    size: str
    mode: str
    rounds: int
    seconds: float
    timed: bool = True


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write the table; returns the exit status."""
    options = _parse(arguments)
    contenders = [name for name in options.contenders if options.mode in CONTENDERS[name].modes]
    settings = Settings(
        size=options.size,
        mode=options.mode,
        rounds=options.rounds,
        seconds=options.limit,
        timed=not options.without_times,
    )
    batches = (batch for model in options.models for batch in _batches(model, contenders, settings))
    return collect(batches, partial(_table, output=options.output, settings=settings), options.directory)


def _batches(model: str, contenders: Sequence[str], settings: Settings) -> Iterator[list[Row]]:
    """Yield the row of each contender, beside eager's if that ran before."""
    reference: Row = {}
    for contender in contenders:
        print(f"{model} {contender} ...", file=sys.stderr, flush=True)
        measured = {"model": model, "contender": contender, **measure(model, contender, settings)}
        if not settings.timed:
            measured["ms"] = None
        reference = measured if contender in REFERENCES else reference
        yield [row_of(measured, reference)]


def measure(model: str, contender: str, settings: Settings) -> dict[str, Cell]:
    """Return one contender's figures in bytes, by each method in a process of its own, or why there are none."""
    found: dict[str, Cell] = {}
    for method in METHODS:
        one = _apart(method, model, contender, settings)
        found |= {key: value for key, value in one.items() if key not in found}
        if "failed" in one:
            return found
    return found


def row_of(measured: Row, reference: Row) -> dict[str, Cell]:
    """Return a row of the table: megabytes, and ratios to eager's figures and to memplan's predictions.

    `above_eager`, which the table does not show, is the ratio of peaks without the padding of memplan's buffers.
    """
    peak = measured.get("peak")
    unpadded = None if peak is None else float(peak) - float(measured.get("padding") or 0)
    return {
        "model": measured["model"],
        "contender": measured["contender"],
        "ms": measured.get("ms"),
        "time_ratio": _ratio(measured.get("ms"), reference.get("ms")),
        "standing_mb": _mb(measured.get("standing")),
        "peak_mb": _mb(measured.get("peak")),
        "ratio": _ratio(measured.get("peak"), reference.get("peak")),
        "resident_mb": _mb(measured.get("resident")),
        "resident_ratio": _ratio(measured.get("resident"), reference.get("resident")),
        "total_mb": _mb(measured.get("total")),
        "of_total": _ratio(measured.get("peak"), measured.get("total")),
        "budget_mb": _mb(measured.get("limit")),
        "of_budget": _ratio(measured.get("peak"), measured.get("limit")),
        "how": measured.get("how"),
        "failed": measured.get("failed"),
        "above_eager": _ratio(unpadded, reference.get("peak")),
    }


def summary(rows: Iterable[Row]) -> list[str]:
    """Return geometric means over the models, and one line for each promise that a measurement breaks."""
    rows = list(rows)
    lines = []
    for contender in dict.fromkeys(row["contender"] for row in rows):
        ratios = [float(r) for row in rows if row["contender"] == contender and (r := row["ratio"]) is not None]
        resident = [
            float(r) for row in rows if row["contender"] == contender and (r := row["resident_ratio"]) is not None
        ]
        if contender not in REFERENCES and ratios:
            means = f"{geometric_mean(ratios):.3f} by memory events"
            means += f", {geometric_mean(resident):.3f} by resident set" if resident else ""
            lines.append(
                f"- {contender}: {means} ({min(ratios):.3f} to {max(ratios):.3f}), above eager for"
                f" {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
            )
    broken = [f"- {row['model']}, {row['contender']}: {what}" for row in rows for what in violations(row)]
    return [
        *(["Geometric means of peak / eager's:", "", *lines] if lines else []),
        *(["", "Broken promises:", "", *broken] if broken else ["", "No promise is broken."]),
    ]


def violations(row: Row) -> list[str]:
    """Return what a row shows to be broken: peaks above memplan's total or budget, and by default above eager's."""
    found = []
    for key, name in (("of_total", "its total"), ("of_budget", "its budget")):
        ratio = row[key]
        if isinstance(ratio, float) and ratio > 1:
            found.append(f"the peak is {ratio:.6f} of {name}")
    ratio = row["above_eager"]
    if row["contender"] in ("memplan", "memplan-step") and isinstance(ratio, float) and ratio > 1:
        found.append(f"the peak, alignment apart, is {ratio:.3f} of eager's")
    return found


def _apart(method: str, model: str, contender: str, settings: Settings) -> dict[str, Cell]:
    """Return the figures of one method, measured in a new process; `failed` says why there are none."""
    command = [
        sys.executable, "-m", "benchmarks.peak_measure", method, model, contender,
        "--size", settings.size, "--mode", settings.mode, "--rounds", str(settings.rounds),
    ]  # fmt: skip
    environment = {**os.environ, **ONE_THREAD, **(RETURN_MEMORY if method == "resident" else {})}
    try:
        run = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, timeout=settings.seconds
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {settings.seconds:g} s"}
    if run.returncode:
        said = [f"exit status {run.returncode}", *run.stderr.strip().splitlines()]
        print(f"{model} {contender}: {said[-1][:300]}", file=sys.stderr, flush=True)
        raised = [line for line in said if re.match(r"[\w.]+: ", line) and not line.startswith("USDT")]
        return {"failed": (raised or said)[-1].removeprefix("memplan.errors.")[:120]}
    figures: dict[str, Cell] = json.loads(run.stdout.splitlines()[-1])
    return figures


def _table(rows: Sequence[Row], output: str, settings: Settings) -> Table:
    shown = {key: heading for key, heading in COLUMNS.items() if any(row[key] is not None for row in rows)}
    return Table(
        name=f"{output}-{settings.size}" + ("-inference" if settings.mode == "inference" else ""),
        title=f"Peak of a step, {settings.mode}, {settings.size} models, cpu",
        columns=shown,
        rows=rows,
        settings={"size": settings.size, "mode": settings.mode, "rounds": settings.rounds, "threads": 1},
        notes=(*NOTES, "", *summary(rows)),
    )


def _ratio(one: Cell, other: Cell) -> float | None:
    return float(one) / float(other) if one is not None and other else None


def _mb(nbytes: Cell) -> float | None:
    return None if nbytes is None else float(nbytes) / 1e6


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = parser_of("peak", "The peak of a step, measured from outside.", list(MODELS))
    parser.add_argument("--size", choices=["nano", "medium"], default="medium")
    parser.add_argument("--mode", choices=["training", "inference"], default="training")
    parser.add_argument("--rounds", type=int, default=5, help="timed steps, and steps whose resident set is measured")
    parser.add_argument("--without-times", action="store_true", help="leave the times out: the machine is not quiet")
    parser.add_argument("--limit", type=float, default=1200.0, help="seconds for each process")
    parser.add_argument(
        "--contenders", type=names(list(CONTENDERS)), default=list(CONTENDERS),
        help=f"comma-separated, or all; ratios need {REFERENCE} first",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
