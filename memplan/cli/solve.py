"""`memplan solve`: places the buffers of a CSV file. It never imports torch."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt
from memplan.errors import InvalidSize

if TYPE_CHECKING:
    from memplan.core.problem import Problem, Solution
    from memplan.report.sections import Form
    from memplan.solvers import Progress

_STDIN = "standard input"
_BUFFERS = "Columns id,lower,upper,size[,alignment][,gaps][,offset]. -: standard input."
_LIVE = "Show the best arena and bound on stderr while it runs; default: on a terminal."
_CAPACITY = "Most bytes the arena may have, as 1048576 or 1MiB; else the file's."


def solve(
    buffers: Annotated[Path, typer.Argument(metavar="BUFFERS.csv|-", help=_BUFFERS)],
    *,
    output: Annotated[Path | None, opt("--output,-o OUT.csv", "Write the buffers with their offsets.")] = None,
    solver: c.Solver = None,
    capacity: Annotated[str | None, opt("--capacity SIZE", _CAPACITY)] = None,
    minimize: Annotated[bool, opt("--minimize", "Find the smallest arena, not the first within the capacity.")] = False,
    time_limit: c.TimeLimit = None,
    seed: Annotated[int, opt("--seed N", "Seed of solvers that use random numbers.")] = 0,
    plot: Annotated[Path | None, opt("--plot FILE.html|svg", "Draw the arena, as a page or a picture.")] = None,
    as_json: Annotated[bool, opt("--json", "Print the result and all offsets as JSON.")] = False,
    live: Annotated[bool | None, opt("--progress/--quiet,_/-q", _LIVE, show_default=False)] = None,
) -> None:
    """Place the buffers of a CSV file, without torch.

    Every buffer gets an offset, so that no two that are alive together overlap.

    A capacity can stand in the file's name, as in A.1048576.csv.

    Exits 1 when nothing fits the capacity, or nothing was found that does.
    """
    from memplan.cli.outputs import require_outputs
    from memplan.cli.source import size_option
    from memplan.core.csvio import parse_problem, read_problem, write_solution
    from memplan.core.problem import Status
    from memplan.solvers import solve as solve_problem

    wanted = size_option("--capacity", capacity, bare=True)
    if plot is not None and plot.suffix.lower() not in (".html", ".svg"):
        raise InvalidSize(f"{plot.name!r} ends in none of .html, .svg", where="--plot")
    name = _STDIN if str(buffers) == "-" else buffers.name
    require_outputs({"--output": output, "--plot": plot}, buffers)
    with contextlib.nullcontext() if live is False else c.stages(f"Reading {name}"):
        problem = parse_problem(sys.stdin.buffer.read(), _STDIN) if name == _STDIN else read_problem(buffers)
    most = problem.capacity if wanted is None else wanted
    with _progress(f"Placing {len(problem.buffers):,} buffers", wanted=live) as listener:
        solution = solve_problem(
            problem, capacity=most, time_limit=time_limit, minimize=minimize or None, solver=solver or "auto",
            seed=seed, on_progress=listener,
        )  # fmt: skip
    c.stop_if_interrupted()
    fits = solution.status in (Status.OPTIMAL, Status.FEASIBLE)
    if output is not None and fits:
        write_solution(output, problem, solution)
    if plot is not None and fits:
        _draw(plot, problem, solution, name)
    if fits:
        c.wrote(output, plot)
    c.show(_form(problem, solution, most, name), Format.JSON if as_json else Format.TABLE)
    if not fits:
        for file in filter(None, (output, plot)):
            c.say(f"{file} was not written: nothing fits", stderr=True, style="bold red")
        raise typer.Exit(1)


@contextlib.contextmanager
def _progress(doing: str, *, wanted: bool | None) -> Iterator[Callable[[Progress], None] | None]:
    """Yield the function that a solver calls with every better arena or bound, or None if nothing is shown.

    `wanted` None: show progress on a terminal only; False: never.
    """
    from memplan.core.units import format_exact, format_share

    if wanted is False or (wanted is None and not c.is_live(c.error_console())):
        yield None
        return
    with c.stages(doing) as tell:

        def listen(news: Progress) -> None:
            if news.incumbent is not None:
                apart = format_share(news.incumbent / news.bound - 1) if news.bound else "-"
                tell(f"arena {format_exact(news.incumbent)}, bound {format_exact(news.bound)}, gap {apart}")

        yield listen


def _draw(path: Path, problem: Problem, solution: Solution, name: str) -> None:
    from memplan.core.files import write_atomic
    from memplan.report.pages import picture_html
    from memplan.report.picture import picture_of
    from memplan.report.svg import picture_svg

    picture = picture_of(problem, solution, name)
    write_atomic(path, picture_svg(picture) if path.suffix.lower() == ".svg" else picture_html(picture))


def _form(problem: Problem, solution: Solution, capacity: int | None, name: str) -> Form:
    from memplan.core.units import format_exact, format_share
    from memplan.report.sections import Form, Section, columns

    proof, arena, share = solution.proof, solution.arena_size, None
    if len(solution.offsets) == len(problem.buffers):
        share = (arena - problem.max_live) / arena if arena else 0.0
    data = {
        **{"buffers": len(problem.buffers), "max_live": problem.max_live, "arena_size": arena, "fragmentation": share},
        **{"capacity": capacity, "status": solution.status.name.lower(), "bound": solution.bound},
        **{"solver": solution.solver, "seconds": round(solution.seconds, 6)},
        "proof": proof and {"step": proof.step, "needed": proof.needed, "ids": list(proof.ids)},
        "offsets": dict(solution.offsets),
    }
    rows = [
        ("buffers", f"{len(problem.buffers):,}"),
        ("max live", format_exact(problem.max_live)),
        *([("capacity", format_exact(capacity))] if capacity is not None else []),
        ("arena", "none" if share is None else format_exact(arena)),
        ("fragmentation", "-" if share is None else format_share(share)),
        ("status", f"{data['status']}: {solution.status.value}"),
        ("solver", solution.solver),
        ("seconds", f"{solution.seconds:.3f}"),
    ]
    if proof is not None:
        more = f" and {len(proof.ids) - 8} more" if len(proof.ids) > 8 else ""
        need = f"alive at step {proof.step}, need {format_exact(proof.needed)}"
        rows.append(("because", f"{', '.join(proof.ids[:8])}{more}, {need}"))
    return Form(title=name, sections=(Section(columns=columns("figure value"), rows=tuple(rows)),), data=data)
