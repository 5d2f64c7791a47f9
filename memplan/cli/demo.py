"""`memplan demo`: shows the main features on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.console import console
from memplan.cli.stages import stages
from memplan.errors import MemplanError, UnreadableFile

if TYPE_CHECKING:
    from memplan.core.plan import Plan

BEFORE, AFTER = "memplan.demo_model:small", "memplan.demo_model:grown"
SHARE = 0.6


def demo(
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where the plan and the pictures go.")
    ] = Path("memplan-demo"),
) -> None:
    """Show everything once on a small model, in about a minute.

    Plans a transformer, draws it, trains it in its arena next to eager, fits it into less memory, and catches a change
    that makes it grow.
    """
    from memplan.cli.source import obtain
    from memplan.core.extras import require_torch

    require_torch("memplan demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnreadableFile(
            f"cannot be made: {error.strerror}", where=str(folder), hint="give --output FOLDER"
        ) from error
    plan_file, page, still = folder / "plan.json", folder / "report.html", folder / "report.svg"
    less = folder / "budget.html"
    _require_own(plan_file, page, still, less)

    with stages("demo") as tell:
        tell(f"planning {BEFORE}")
        plan = obtain(BEFORE)
    _heading(1, "What does a training step need?", f"memplan report {BEFORE}")
    _report(plan)
    _heading(2, "Where does every tensor lie, and when?", f"memplan report {BEFORE} --save {plan_file} --html {page}")
    _pictures(plan, plan_file, page, still)
    _heading(3, "Does it run in exactly that?", "compiled = memplan.compile(model, inputs)")
    _train()
    _heading(4, "What if there is less memory?", f"memplan.compile(model, inputs, arena_budget={SHARE}, costs='a100')")
    _budget(plan, less)
    _heading(5, "What if a change makes it grow?", f"memplan check {AFTER} --baseline ... --fail-over arena:+2%")
    with stages("demo") as tell:
        tell(f"planning {AFTER}")
        after = obtain(AFTER)
    _gate(plan, after)
    _print_line(
        f"\nDone. Open {page} in a browser; on your own model: memplan report FILE.py:FACTORY --html report.html"
    )


def _require_own(plan_file: Path, *pictures: Path) -> None:
    """Raise `InvalidOutput` unless all files can be written and existing ones come from an earlier demo.

    The model's name in the plan file tells whether they do.
    """
    from memplan.cli.outputs import refused, require_outputs

    files = plan_file, *pictures
    for file in files:
        require_outputs({"--output": file})
    there = next((file for file in files if file.exists()), None)
    if there is not None and not _is_demo_plan(plan_file):
        raise refused(there, "--output", "is not of an earlier demo", "name another folder")


def _is_demo_plan(plan_file: Path) -> bool:
    from memplan.planning.planfile import load

    try:
        return load(plan_file).model == BEFORE
    except MemplanError:
        return False


def _heading(number: int, question: str, command: str) -> None:
    from rich.text import Text

    screen = console()
    screen.print()
    screen.print(Text.assemble((f"{number}. {question}  ", "bold cyan"), (f"$ {command}", "dim")), soft_wrap=True)
    screen.print()


def _print_line(text: str) -> None:
    from rich.text import Text

    console().print(Text(text), soft_wrap=True)


def _report(plan: Plan) -> None:
    from memplan.core.units import format_exact, format_share
    from memplan.report.lines import title, verdict
    from memplan.solvers import solve

    report = plan.report()
    naive = solve(plan.problem, solver="naive").arena_size
    _print_line(title(report))
    _print_line(verdict(report))
    _print_line(f"arena     {format_exact(plan.arena_size)}, {format_share(plan.fragmentation)} of it lost at the peak")
    _print_line(f"one tensor after the other, nothing shared, would need {format_exact(naive)}")
    _print_line(f"outside   {format_exact(report.outside_total)}: parameters, gradients, inputs")
    for lever in report.advice[:1]:
        _print_line(f"advice    {lever.text}")


def _pictures(plan: Plan, plan_file: Path, page: Path, still: Path) -> None:
    from memplan.cli.pictures import write_html, write_svg
    from memplan.report.picture import picture_of_plan

    picture = picture_of_plan(plan)
    plan.save(plan_file)
    write_html(page, picture)
    write_svg(still, picture)
    for file, what in ((plan_file, "the plan, JSON"), (page, "zoom, hover, who is alive"), (still, "a still picture")):
        _print_line(f"wrote {file}  ({what})")


def _train() -> None:
    with stages("demo") as tell:
        tell("training in the arena, and by eager")
        from memplan.demo_model import train

        done = train()
    for step, (eager, planned) in enumerate(zip(done.eager, done.planned, strict=True)):
        _print_line(f"step {step}: loss {planned:.6f} in the arena, {eager:.6f} by eager")
    _print_line(
        "losses and parameters are equal bit by bit"
        if done.bitwise
        else "losses or parameters DIFFER: please report it"
    )


def _budget(plan: Plan, page: Path) -> None:
    from memplan.cli.pictures import write_html
    from memplan.core.units import format_exact
    from memplan.evict.costs import DEVICES
    from memplan.planning.budget import plan_within
    from memplan.planning.make_plan import ScheduledGraph
    from memplan.planning.options import PlanOptions
    from memplan.report.lines import budget_lines
    from memplan.report.picture import picture_of_plan

    with stages("demo") as tell:
        tell("fitting it; the first time on a machine, this compiles the search")
        kept = plan_within(ScheduledGraph.of(plan), PlanOptions(arena_budget=SHARE), DEVICES["a100"])
    _print_line(f"arena     {format_exact(kept.arena_size)} instead of {format_exact(plan.arena_size)}")
    for line in budget_lines(kept.report()):
        _print_line(line)
    write_html(page, picture_of_plan(kept))
    _print_line(f"wrote {page}  (the same picture, an arrow for everything that leaves and comes back)")


def _gate(before: Plan, after: Plan) -> None:
    from memplan.analysis.figures import figures_of
    from memplan.check.check import check
    from memplan.check.rules import parse_rule
    from memplan.report.verdict_table import verdicts_table
    from memplan.report.verdicts import Judged

    verdict = check(after, [parse_rule("arena:+2%")], figures_of(before))
    screen = console()
    screen.print(verdicts_table([Judged(name="demo", verdict=verdict)], screen.width))
