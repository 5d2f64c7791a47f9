"""The default solver on large traces: generated ones with long and short lives mixed, and graphs of the IOPDDL contest.

    python -m benchmarks.solver_traces --out
    python -m benchmarks.solver_traces --iopddl FOLDER --idealloc PATH --out

Of each problem: the arena above max live, a lower bound of every arena, under the default limits and after a time limit
in wall time; beside them first-fit by size and best-fit in the order of time, which compilers and allocators run. Every
placement is validated. `--against CHECKOUT` solves the same problems with the memplan of another checkout, in processes
of its own.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.instances import LIVES, mixed_lives
from benchmarks.results import RESULTS, Cell, Row, Table, collect
from benchmarks.solver import idealloc_row
from memplan.core.csvio import read_problem, write_solution
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.validate import validate
from memplan.solvers import solve

SIZES = (2_000, 8_000, 20_000, 62_000)
_SIDE = 20_000  # buffers: above, the plain heuristics are not asked
COLUMNS = {
    "instance": "instance",
    "buffers": "buffers",
    "default": "above max live, default, %",
    "default_s": "CPU s",
    "timed": "above max live, time limit, %",
    "proven": "proven optimal",
    "greedy": "first-fit by size, %",
    "best": "online best-fit, %",
    "before": "the other checkout, default, %",
    "before_s": "the other checkout, CPU s",
    "before_timed": "the other checkout, time limit, %",
    "idealloc_s": "idealloc CPU s",
    "idealloc_ratio": "idealloc arena / max live",
}
NOTES = (
    "`default`: no limit given; `time limit`: `seconds` of wall time. 0 is max live, which no arena is below. A dash: "
    "not asked, or nothing within the limit.",
)
_OTHER = """
import json, sys, time
from memplan.core.csvio import read_problem
from memplan.solvers import solve
problem = read_problem(sys.argv[1])
solve(problem, work_limit=300_000)  # compiles the kernels
began = time.process_time()
found = [solve(problem)]
seconds = time.process_time() - began
if float(sys.argv[2]):
    found.append(solve(problem, time_limit=float(sys.argv[2])))
print(json.dumps([seconds, *(solution.arena_size for solution in found)]))
"""


def problems(args: argparse.Namespace) -> Iterator[tuple[str, Problem]]:
    """The problems of one run, by name."""
    if args.iopddl is not None:
        for name, path in graphs(args.iopddl):
            for usage in USAGES:
                yield f"{name}-{usage}", read(path, usage=usage)
        return
    for n in args.sizes:
        for lives in LIVES:
            for seed in range(args.seeds):
                yield f"{lives}-{seed}", mixed_lives(n, seed=seed, lives=lives)


def measure(name: str, problem: Problem, args: argparse.Namespace) -> Row:
    """One row of the table."""
    least = problem.max_live
    began = time.process_time()
    found = solve(problem)
    row: dict[str, Cell] = {
        "instance": name, "buffers": len(problem.buffers), "default": _above(found.arena_size, least),
        "default_s": time.process_time() - began, "proven": found.arena_size == found.bound,
    }  # fmt: skip
    validate(problem, found)
    if args.seconds and found.arena_size > found.bound:
        timed = solve(problem, time_limit=args.seconds)
        validate(problem, timed)
        found = min(found, timed, key=lambda solution: solution.arena_size)
        row["proven"] = found.arena_size == max(timed.bound, found.bound)
    row["timed"] = _above(found.arena_size, least)
    if len(problem.buffers) <= _SIDE:
        row["greedy"] = _above(solve(problem, solver="greedy").arena_size, least)
        row["best"] = _above(solve(problem, solver="online-best").arena_size, least)
    if args.against is not None:
        row |= _other(problem, args.against, args.seconds, args.cache)
    if args.idealloc is not None:
        row |= idealloc_row(problem, args.idealloc, 1, least)
    return row


def _above(arena: int, least: int) -> float:
    return round(100 * (arena / least - 1), 3)


def _other(problem: Problem, checkout: Path, seconds: float, cache: str) -> dict[str, Cell]:
    """The same problem, solved by the memplan of another checkout, whose compiled kernels are in `cache`."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "problem.csv"
        write_solution(path, problem, solve(problem, solver="naive"))
        assert read_problem(path) == problem
        run = subprocess.run(
            [sys.executable, "-c", _OTHER, str(path), str(seconds)], capture_output=True, text=True, check=True,
            cwd=checkout, env={**os.environ, "PYTHONPATH": str(checkout), "NUMBA_CACHE_DIR": cache},
        )  # fmt: skip
    took, arena, *timed = json.loads(run.stdout)
    row: dict[str, Cell] = {"before": _above(arena, problem.max_live), "before_s": took}
    return row | ({"before_timed": _above(min(arena, *timed), problem.max_live)} if timed else {})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--iopddl", type=Path, help="folder of google/iopddl's benchmarks, instead of generated traces")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="buffers of the generated traces")
    parser.add_argument("--seeds", type=int, default=1, help="generated traces of each kind and size (default 1)")
    parser.add_argument("--seconds", type=float, default=60.0, help="the time limit; 0 leaves that column out")
    parser.add_argument("--against", type=Path, help="another checkout of memplan, solved with beside this one")
    parser.add_argument("--idealloc", help="path of idealloc's binary")
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, default=None, help="folder of the table")
    args = parser.parse_args(argv)
    name = "solver-traces" if args.iopddl is None else "solver-iopddl"
    solve(mixed_lives(2_500, seed=0), work_limit=60_000)  # compiles the kernels

    def table(rows: Sequence[Row]) -> Table:
        settings: dict[str, Cell] = {"seconds": args.seconds, "seeds": args.seeds}
        title = "Offset solver: long and short lives mixed" if args.iopddl is None else "Offset solver: IOPDDL"
        filled = {key: title for key, title in COLUMNS.items() if any(row.get(key) is not None for row in rows)}
        return Table(name=name, title=title, columns=filled, rows=rows, settings=settings, notes=NOTES)

    with tempfile.TemporaryDirectory() as folder:
        args.cache = str(Path(folder) / "numba")
        rows = ([measure(name, problem, args)] for name, problem in problems(args))
        return collect(rows, table, args.out or Path(folder))


USAGES = {"biggest": max, "smallest": min}


def read(path: Path, *, usage: str = "biggest") -> Problem:
    """The problem of one graph, a `.json` file or a `.json.gz` one. `usage` is a key of `USAGES`."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return of_nodes(json.loads(text)["problem"]["nodes"], usage=usage)


def of_nodes(nodes: dict[str, Any], *, usage: str = "biggest") -> Problem:
    """The problem of `nodes`, an object with the lists `intervals` and `usages`."""
    chosen = USAGES[usage]
    return Problem(
        buffers=tuple(
            Buffer(id=str(i), size=chosen(usages) + 1, live=Interval(first, last + 1))
            for i, ((first, last), usages) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
        )
    )


def graphs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The graphs of a folder, by name: `asplos-2025-iopddl-A.json.gz` is `A`."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        yield path.name.partition(".")[0].rpartition("-")[2], path


if __name__ == "__main__":
    sys.exit(main())
