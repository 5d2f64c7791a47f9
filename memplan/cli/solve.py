"""`memplan solve`: places the buffers of a CSV file. It never imports torch."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from memplan.cli.console import console, error_console, progress, wrote
from memplan.cli.live import solver_progress

if TYPE_CHECKING:
    from memplan.core.problem import Problem, Solution

_STDIN = "standard input"


def solve(
    buffers: Annotated[
        Path,
        typer.Argument(
            metavar="BUFFERS.csv|-", help="Columns id,lower,upper,size[,alignment][,gaps][,offset]. -: standard input."
        ),
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="OUT.csv", help="Write the buffers with their offsets.")
    ] = None,
    solver: Annotated[
        str, typer.Option("--solver", metavar="NAME", help="Which solver places the buffers: auto or its name.")
    ] = "auto",
    capacity: Annotated[
        str | None,
        typer.Option(
            "--capacity", metavar="SIZE", help="Most bytes the arena may have, as 1048576 or 1MiB; else the file's."
        ),
    ] = None,
    minimize: Annotated[
        bool,
        typer.Option("--minimize", help="Find the smallest arena, not the first that fits the capacity."),
    ] = False,
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", help="How long the solver may take.")
    ] = None,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Seed of solvers that use random numbers.")] = 0,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot", metavar="FILE.html|svg|png", help="Draw the arena: FILE.svg, or FILE.html to zoom into."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result and all offsets as JSON.")] = False,
    live: Annotated[
        bool | None,
        typer.Option(
            "--progress/--quiet",
            " /-q",
            help="Show the best arena and bound on stderr while it runs; default: on a terminal.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Place the buffers of a CSV file, without torch.

    Every buffer gets an offset, so that no two that are alive together overlap.

    A capacity can stand in the file's name, as in A.1048576.csv.

    Exits 1 when nothing fits the capacity, or nothing was found that does.
    """
    from memplan.cli.interrupt import stop_if_interrupted
    from memplan.cli.outputs import require_outputs
    from memplan.cli.source import seconds_option, size_option
    from memplan.core.csvio import write_solution
    from memplan.core.problem import Status
    from memplan.solvers import solve as solve_problem

    limit, wanted = seconds_option("--time-limit", time_limit), size_option("--capacity", capacity)
    draw = None
    if plot is not None:
        from memplan.cli.pictures import writer_for

        draw = writer_for("--plot", plot)
    name = _STDIN if str(buffers) == "-" else buffers.name
    require_outputs({"--output": output, "--plot": plot}, buffers)
    with contextlib.nullcontext() if live is False else progress(f"Reading {name}"):
        problem = _read(buffers)
    capacity_bytes = problem.capacity if wanted is None else wanted
    with solver_progress(f"Placing {len(problem.buffers):,} buffers", wanted=live) as listener:
        solution = solve_problem(
            problem, capacity=capacity_bytes, time_limit=limit, minimize=minimize or None, solver=solver, seed=seed,
            on_progress=listener,
        )  # fmt: skip
    stop_if_interrupted()
    fits = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    if output is not None and fits:
        write_solution(output, problem, solution)
    if plot is not None and draw is not None and fits:
        from memplan.report.picture import picture_of

        draw(plot, picture_of(problem, solution, name))
    if fits:
        wrote(output, plot)
    if as_json:
        typer.echo(json.dumps(_figures(problem, solution, capacity_bytes), indent=2))
    else:
        _print(problem, solution, capacity_bytes)
    if not fits:
        for file in filter(None, (output, plot)):
            error_console().print(f"{file} was not written: nothing fits", style="bold red", soft_wrap=True)
        raise typer.Exit(1)


def _read(buffers: Path) -> Problem:
    from memplan.core.csvio import parse_problem, read_problem

    return parse_problem(sys.stdin.buffer.read(), _STDIN) if str(buffers) == "-" else read_problem(buffers)


def _figures(problem: Problem, solution: Solution, capacity: int | None) -> dict[str, Any]:
    proof = solution.proof
    return {
        "buffers": len(problem.buffers),
        "max_live": problem.max_live,
        "arena_size": solution.arena_size,
        "fragmentation": _fragmentation(problem, solution),
        "capacity": capacity,
        "status": solution.status.name.lower(),
        "bound": solution.bound,
        "solver": solution.solver,
        "seconds": round(solution.seconds, 6),
        "proof": proof and {"step": proof.step, "needed": proof.needed, "ids": list(proof.ids)},
        "offsets": dict(solution.offsets),
    }


def _fragmentation(problem: Problem, solution: Solution) -> float | None:
    """Return the fragmentation of a solution, None without a placement."""
    if len(solution.offsets) < len(problem.buffers):
        return None
    return (solution.arena_size - problem.max_live) / solution.arena_size if solution.arena_size else 0.0


def _print(problem: Problem, solution: Solution, capacity: int | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from memplan.core.units import format_exact, format_share

    share = _fragmentation(problem, solution)
    lines = [
        ("buffers", f"{len(problem.buffers):,}"),
        ("max live", format_exact(problem.max_live)),
        ("arena", "none" if share is None else format_exact(solution.arena_size)),
        ("fragmentation", "-" if share is None else format_share(share)),
        ("status", f"{solution.status.name.lower()}: {solution.status.value}"),
        ("solver", solution.solver),
        ("seconds", f"{solution.seconds:.3f}"),
    ]
    if capacity is not None:
        lines.insert(2, ("capacity", format_exact(capacity)))
    if solution.proof is not None:
        from memplan.report.lines import printable

        shown = ", ".join(printable(name) for name in solution.proof.ids[:8])
        more = f" and {len(solution.proof.ids) - 8} more" if len(solution.proof.ids) > 8 else ""
        lines.append(
            (
                "because",
                f"{shown}{more}, alive at step {solution.proof.step}, need {format_exact(solution.proof.needed)}",
            )
        )
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for label, text in lines:
        table.add_row(label, Text(text))
    console().print(table)
