"""The offset solver against the field, in one run: quality (arena / max live), seconds, and proofs.

    python -m benchmarks.solver --instances ../shared/instances --seeds 21 --minimalloc PATH --idealloc PATH

Three tasks: `fit` (stop at the first placement within the capacity), `minimize` (the smallest arena within
the limit) and `default` (minimize under the default limits). Times are CPU seconds, which other work on
a shared machine disturbs least: ours of warm calls on one thread, validation included, an external binary's of
the whole process. Limits are units of work (`memplan/solvers/limits.py`), for large problems and external binaries wall
time. Instances are read from a folder of CSV files in minimalloc's format; planted packings and large problems
are generated (`instances.py`).
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.instances import network, planted, scattered, tiled
from benchmarks.results import RESULTS, Cell, Table, to_markdown, write
from memplan.core.csvio import read_problem, write_solution
from memplan.core.problem import Problem, Status
from memplan.solvers import SOLVERS, solve
from memplan.solvers.base import Progress

HEURISTICS = {name: s for name, s in SOLVERS.items() if name not in ("portfolio", "naive")}
_QUADRATIC = {"partition"}  # pure Python: only up to 2,000 buffers
_FIT_WORK = 3_000_000  # units: up to about 15 CPU seconds
_MINIMIZE_WORK = 10_000_000  # units: up to about 60 CPU seconds
_FIT_SECONDS, _EXTERNAL_SECONDS = 15.0, 30.0  # of external binaries
COLUMNS = {
    "instance": "instance",
    "buffers": "buffers",
    "task": "task",
    "solved": "within capacity / proven optimal",
    "median_s": "median CPU s",
    "worst_s": "worst CPU s",
    "first_s": "first answer, CPU s",
    "ratio": "arena / bound",
    "arena": "arena bytes",
    "minimalloc_s": "minimalloc CPU s",
    "minimalloc_ratio": "minimalloc arena / bound",
    "idealloc_s": "idealloc CPU s",
    "idealloc_ratio": "idealloc arena / bound",
    **{name: name for name in HEURISTICS},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row: a problem, what is asked of it, and how often (one seed a time)."""

    name: str
    problem: Problem
    task: str
    seconds: float | None
    seeds: int
    work: int | None = None


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    began = time.perf_counter()
    solve(_free(planted(200, seed=2, density=0.95)), work_limit=60_000)
    solve(network(120, seed=0), work_limit=60_000)  # the kernels for many buffers
    compiled = time.perf_counter() - began
    rows = []
    for case in cases(args):
        if args.only and not case.name.startswith(tuple(args.only.split(","))):
            continue
        if args.tasks and case.task not in args.tasks.split(","):
            continue
        rows.append(measure(case, args))
        print({key: value for key, value in rows[-1].items() if value is not None}, file=sys.stderr, flush=True)
    settings: dict[str, Cell] = {"seeds": args.seeds, "minimize_work": args.work, "first_call_s": compiled}
    if args.idealloc:
        settings["idealloc_lives"] = args.idealloc_lives
    table = Table(name="solver", title="Offset solver", columns=COLUMNS, rows=rows, settings=settings, notes=NOTES)
    print(to_markdown(table) if args.out is None else write(table, args.out))
    return 0


NOTES = (
    "`bound` is max live unless the solver proved a higher one. `fit`: first placement within the capacity "
    f"in at most {_FIT_WORK:,} units of work a seed (external binaries: {_FIT_SECONDS:g} s); `minimize`: smallest "
    "arena, of instances from files within `minimize_work` units on each of three seeds, of which the worst arena is "
    f"shown, of large ones within 60 s of wall time (external binaries: {_EXTERNAL_SECONDS:g} s); `default`: no "
    "limit given. "
    "`first_call_s` are the first solves of the process, which compile or load the kernels.",
    "minimalloc is asked up to 2,000 buffers, of planted packings with 200; idealloc with `--max-lives idealloc_lives` "
    f"up to 2,000 buffers, with one life above (at most {_EXTERNAL_SECONDS:g} s). An empty cell of theirs: nothing "
    "within the limit, or not asked.",
    "The columns of heuristics are arena / bound; empty where a pure-Python heuristic is quadratic and n is large.",
)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Every row of the table, small ones first."""
    files = sorted(Path(args.instances).glob("*.csv")) if args.instances else []
    read = [(path.name.partition(".")[0], read_problem(path)) for path in files]
    for name, problem in read:
        if problem.capacity is not None:
            yield Case(name=name, problem=problem, task="fit", seconds=None, work=_FIT_WORK, seeds=args.seeds)
    for name, problem in read:
        yield Case(name=name, problem=_free(problem), task="minimize", seconds=None, work=args.work, seeds=3)
    for n in (200, 400):
        for density in (1.0, 0.95, 0.85):
            for seed in range(3):
                problem = planted(n, seed=seed, density=density)
                name = f"planted-{n}-{density}-{seed}"
                yield Case(name=name, problem=problem, task="fit", seconds=None, work=_FIT_WORK, seeds=1)
    for layers in (100, 1000, 3000):
        problem = network(layers, seed=layers)
        yield Case(name=f"network-{layers}", problem=problem, task="default", seconds=None, seeds=1)
    deep = scattered(20_000, seed=1, mean_life=400.0)
    yield Case(name="deep-20000", problem=deep, task="minimize", seconds=args.seconds, seeds=1)
    if args.scale:
        for name, problem in read:
            if problem.capacity is None:
                times = args.scale // len(problem.buffers)
                yield Case(name=f"tiled-{name}", problem=tiled(problem, times), task="minimize", seconds=60, seeds=1)
        yield Case(name="scattered", problem=scattered(args.scale, seed=1), task="minimize", seconds=60, seeds=1)


def measure(case: Case, args: argparse.Namespace) -> dict[str, Cell]:
    """One row of the table."""
    problem, times, arenas, firsts, solved = case.problem, [], [], [], 0
    bound = problem.max_live
    for seed in range(case.seeds):
        heard: list[float] = []
        began = time.process_time()
        solution = solve(
            problem, time_limit=case.seconds, work_limit=case.work, seed=seed,
            on_progress=partial(_hear, heard, began),
        )  # fmt: skip
        times.append(time.process_time() - began)
        arenas.append(solution.arena_size)
        bound = max(bound, solution.bound)
        if heard:
            firsts.append(heard[0])
        fits = problem.capacity is not None and solution.arena_size <= problem.capacity
        solved += fits or solution.status is Status.OPTIMAL
    row: dict[str, Cell] = {
        "instance": case.name, "buffers": len(problem.buffers), "task": case.task,
        "solved": f"{solved}/{case.seeds}", "median_s": statistics.median(times), "worst_s": max(times),
        "first_s": statistics.median(firsts) if firsts else None, "ratio": round(max(arenas) / bound, 5),
        "arena": max(arenas),
    }  # fmt: skip
    for name, solver in HEURISTICS.items():
        if len(problem.buffers) <= (2_000 if name in _QUADRATIC else 20_000):
            row[name] = solve(_free(problem), solver=solver).arena_size / bound
    if args.minimalloc and len(problem.buffers) <= 2_000 and not case.name.startswith("planted-4"):
        row |= _minimalloc(case, args.minimalloc, bound)
    if args.idealloc:
        lives = args.idealloc_lives if len(problem.buffers) <= 2_000 else 1
        row |= idealloc_row(case.problem, args.idealloc, lives, bound)
    return row


def _hear(heard: list[float], began: float, _: Progress) -> None:
    heard.append(time.process_time() - began)


def _free(problem: Problem) -> Problem:
    return Problem(buffers=problem.buffers)


def _minimalloc(case: Case, binary: str, bound: int) -> dict[str, Cell]:
    """minimalloc on the same task: `--capacity`, or `--minimize_capacity` from the naive arena down."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.csv", Path(folder) / "out.csv"
        _write_input(source, case.problem)
        limit = _EXTERNAL_SECONDS if case.task != "fit" else _FIT_SECONDS
        capacity = case.problem.capacity or 2 * bound
        command = [binary, f"--input={source}", f"--output={target}", f"--capacity={capacity}", f"--timeout={limit}s"]
        if case.task != "fit":
            command.append("--minimize_capacity")
        seconds = _timed(command, limit)
        if seconds is None or not target.exists() or not target.read_text().strip():
            return {"minimalloc_s": None, "minimalloc_ratio": None}
        return {"minimalloc_s": seconds, "minimalloc_ratio": _arena(target) / bound}


def idealloc_row(problem: Problem, binary: str, lives: int, bound: int) -> dict[str, Cell]:
    """idealloc (`coreba`, binary `idealloc`) reads minimalloc's CSV and prints `Makespan:` and its bytes."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "in.csv"
        _write_input(source, problem)
        began = _children_seconds()
        try:
            run = subprocess.run(
                [binary, "--input", str(source), "--max-lives", str(lives), "ex-csv"],
                capture_output=True, text=True, check=True, timeout=_EXTERNAL_SECONDS,
            )  # fmt: skip
        except (subprocess.SubprocessError, OSError):
            return {"idealloc_s": None, "idealloc_ratio": None}
        seconds = _children_seconds() - began
    _, _, after = run.stdout.rpartition("Makespan:")
    return {"idealloc_s": seconds, "idealloc_ratio": int(after.split()[0]) / bound if after else None}


def _timed(command: Sequence[str], limit: float) -> float | None:
    began = _children_seconds()
    try:
        subprocess.run(command, capture_output=True, check=True, timeout=limit + 5)
    except (subprocess.SubprocessError, OSError):
        return None
    return _children_seconds() - began


def _children_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _write_input(path: Path, problem: Problem) -> None:
    solution = solve(_free(problem), solver="naive")
    write_solution(path, problem, solution)
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line.rpartition(",")[0] for line in lines) + "\n")


def _arena(path: Path) -> int:
    header, *rows = (line.split(",") for line in path.read_text().splitlines() if line)
    size, offset = header.index("size"), header.index("offset")
    return max(int(row[size]) + int(row[offset]) for row in rows)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--instances", help="folder of CSV files; a capacity may stand in a file's name")
    parser.add_argument("--seeds", type=int, default=21, help="runs of each `fit` task (default 21)")
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit on large problems (default 60)")
    parser.add_argument("--work", type=int, default=_MINIMIZE_WORK, help="units for each `minimize` of a file")
    parser.add_argument("--scale", type=int, default=1_000_000, help="buffers of the large problems; 0 leaves them out")
    parser.add_argument("--only", help="only instances whose names start with one of these (comma-separated)")
    parser.add_argument("--tasks", help="only these tasks (of fit, minimize, default; comma-separated)")
    parser.add_argument("--minimalloc", help="path of google/minimalloc's binary")
    parser.add_argument("--idealloc", help="path of idealloc's binary")
    parser.add_argument("--idealloc-lives", type=int, default=100, help="its tries to beat its own heuristic")
    parser.add_argument("--out", type=Path, nargs="?", const=RESULTS, help="write solver.json and .md there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
