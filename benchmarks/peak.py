"""The peak of a step as its users measure it: memplan, eager, Inductor, with checkpoints and budgets.

    python -m benchmarks.peak --size medium --contenders eager,eager+checkpoint,inductor,memplan

Each figure is taken from outside (`benchmarks.peak_measure`), in a process of its own, on the CPU with one thread:
by memory events, and, in another process, by the growth of the resident set. Below the table stand the geometric means
over the models, and each promise of memplan that a measurement breaks. `--keep all` goes on with the table that is
there, and `--keep others` measures the rows anew that are asked for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean
from types import MappingProxyType

from benchmarks.peak_measure import CONTENDERS, METHODS, MODELS, RETURN_MEMORY
from benchmarks.preloaded import ONE_THREAD
from benchmarks.results import Cell, Row, Table, collect, names, parser_of

REFERENCE = "eager"
STEP_REFERENCE = "eager-step"  # what whole steps are compared with
NEVER_ABOVE: Mapping[str, str] = MappingProxyType(
    {"memplan": REFERENCE, "memplan+checkpoint": "eager+checkpoint", "memplan-step": STEP_REFERENCE}
)  # the contenders that promise to need no more than another
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
    "host_mb": "offloaded to the host, MB",
    "total_mb": "memplan's total, MB",
    "of_total": "peak / total",
    "budget_mb": "budget, MB",
    "of_budget": "peak / budget",
    "how": "how blocks are checkpointed",
    "failed": "did not run",
    "date": "measured on",
}
NOTES = (
    "Peak: the bytes of all tensors that are alive before the step (parameters, buffers, inputs, and what the contender"
    " keeps between steps), and by how much one step exceeds them: by the profiler's memory events, and, in another"
    " process, by the high-water mark of the resident set. MB = 10^6 bytes. Steps begin without gradients.",
    "The bytes that memplan offloads to the host, here the same memory, have a column of their own, and are not in the"
    " peak.",
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
    kept = {} if options.keep == "none" else rows_in(options.directory / f"{_name(options.output, settings)}.json")
    known = kept.keys() if options.keep == "all" else ()
    wanted = [(m, c) for m in options.models for c in contenders if (m, c) not in known]
    table = partial(_table, output=options.output, settings=settings, kept=kept)
    return collect(_batches(wanted, kept, settings), table, options.directory)


def _batches(
    wanted: Iterable[tuple[str, str]], kept: Mapping[tuple[str, str], Row], settings: Settings
) -> Iterator[list[Row]]:
    """Yield the row of each model and contender, beside eager's if that was measured before."""
    eager = {key: _in_bytes(row) for key, row in kept.items() if key[1] in (REFERENCE, STEP_REFERENCE)}
    for model, contender in wanted:
        print(f"{model} {contender} ...", file=sys.stderr, flush=True)
        measured = {"model": model, "contender": contender, **measure(model, contender, settings)}
        if not settings.timed:
            measured["ms"] = None
        eager[model, contender] = measured
        yield [row_of(measured, eager.get((model, reference_of(contender)), {}))]


def reference_of(contender: str) -> str:
    """Return the contender that another one is compared with."""
    return STEP_REFERENCE if contender.endswith("-step") else REFERENCE


def rows_in(file: Path) -> dict[tuple[str, str], Row]:
    """Return the rows of a table that was written before, by model and contender; none without a file."""
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"] if file.exists() else []
    return {(row["model"], row["contender"]): row for row in rows}


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
        "host_mb": _mb(measured.get("host")),
        "total_mb": _mb(measured.get("total")),
        "of_total": _ratio(measured.get("peak"), measured.get("total")),
        "budget_mb": _mb(measured.get("limit")),
        "of_budget": _ratio(measured.get("peak"), measured.get("limit")),
        "how": measured.get("how"),
        "failed": measured.get("failed"),
        "date": datetime.date.today().isoformat(),
        "above_eager": _ratio(unpadded, reference.get("peak")),
    }


def summary(rows: Iterable[Row]) -> list[str]:
    """Return geometric means over the models, and one line for each promise that a measurement breaks."""
    rows = list(rows)
    lines = []
    for contender in dict.fromkeys(str(row["contender"]) for row in rows):
        ratios = [float(r) for row in rows if row["contender"] == contender and (r := row["ratio"]) is not None]
        resident = [
            float(r) for row in rows if row["contender"] == contender and (r := row["resident_ratio"]) is not None
        ]
        if contender not in (REFERENCE, STEP_REFERENCE) and ratios:
            means = f"{geometric_mean(ratios):.3f} by memory events"
            means += f", {geometric_mean(resident):.3f} by resident set" if resident else ""
            lines.append(
                f"- {contender}: {means} ({min(ratios):.3f} to {max(ratios):.3f}), above {reference_of(contender)} for"
                f" {sum(ratio > 1 for ratio in ratios)} of {len(ratios)}"
            )
    broken = [f"- {row['model']}, {row['contender']}: {what}" for row in rows for what in violations(row, rows)]
    return [
        *(["Geometric means of peak / eager's:", "", *lines] if lines else []),
        *(["", "Broken promises:", "", *broken] if broken else ["", "No promise is broken."]),
    ]


def violations(row: Row, rows: Collection[Row]) -> list[str]:
    """Return what a row shows to be broken: peaks above memplan's total or budget, and without a budget above eager's.

    `rows`: those of the table, eager's among them.
    """
    found = []
    for key, name in (("of_total", "its total"), ("of_budget", "its budget")):
        ratio = row[key]
        if isinstance(ratio, float) and ratio > 1:
            found.append(f"the peak is {ratio:.6f} of {name}")
    eager = {r["contender"]: r["ratio"] for r in rows if r["model"] == row["model"]}
    name = NEVER_ABOVE.get(str(row["contender"]), "")
    ratio = _ratio(row["above_eager"], eager.get(name))
    if ratio is not None and ratio > 1:
        found.append(f"the peak, alignment apart, is {ratio:.3f} of that of {name}")
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


def _table(rows: Sequence[Row], output: str, settings: Settings, kept: Mapping[tuple[str, str], Row]) -> Table:
    """Return the table of the rows, and of those kept that were not measured again, in the order of their names."""
    found = {**kept, **{(str(row["model"]), str(row["contender"])): row for row in rows}}
    models, contenders = list(MODELS), list(CONTENDERS)
    rows = [found[key] for key in sorted(found, key=lambda key: (models.index(key[0]), contenders.index(key[1])))]
    shown = {key: heading for key, heading in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
    return Table(
        name=_name(output, settings),
        title=f"Peak of a step, {settings.mode}, {settings.size} models, cpu",
        columns=shown,
        rows=rows,
        settings={"size": settings.size, "mode": settings.mode, "rounds": settings.rounds, "threads": 1},
        notes=(*NOTES[: 3 if settings.timed else 2], "", *summary(rows)),
    )


def _name(output: str, settings: Settings) -> str:
    """Return the name of the table's files."""
    return f"{output}-{settings.size}" + ("-inference" if settings.mode == "inference" else "")


def _in_bytes(row: Row) -> Row:
    """Return what later rows are compared with of a row that was written before."""
    peaks = {key: row.get(f"{key}_mb") for key in ("peak", "resident")}
    return {"ms": row.get("ms"), **{key: None if mb is None else round(float(mb) * 1e6) for key, mb in peaks.items()}}


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
    parser.add_argument(
        "--keep", choices=["none", "all", "others"], default="none",
        help="of the table that is there: all rows, and measure those that it lacks; or those not asked for",
    )  # fmt: skip
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
