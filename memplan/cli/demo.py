"""`memplan demo`: shows the main features on a small model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from memplan.cli.console import Format, console, opt, say, show, stages
from memplan.errors import MemplanError, UnreadableFile

if TYPE_CHECKING:
    from memplan.core.plan import Plan

BEFORE, AFTER = "memplan.demo_model:small", "memplan.demo_model:grown"
SHARE = 0.6


def demo(
    folder: Annotated[Path, opt("--output,-o FOLDER", "Where the plan and the pictures go.")] = Path("memplan-demo"),
) -> None:
    """Show everything once on a small model, in about a minute.

    Plans a transformer, draws it, trains it in its arena next to eager, fits it into less memory, and catches a change
    that makes it grow.
    """
    from memplan.cli.source import obtain
    from memplan.core.extras import require_torch
    from memplan.core.files import write_atomic
    from memplan.report.lines import report_form

    require_torch("memplan demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made: {error.strerror}"
        raise UnreadableFile(what, where=str(folder), hint="give --output FOLDER") from error
    plan_file, page = folder / "plan.json", folder / "report.html"
    still, less = folder / "report.svg", folder / "budget.html"
    _require_own(plan_file, page, still, less)
    with stages("demo") as tell:
        tell(f"planning {BEFORE}")
        plan = obtain(BEFORE)
    _heading(1, "What does a training step need?", f"memplan report {BEFORE}")
    show(report_form(plan.report()), Format.TABLE)
    _heading(2, "Where does every tensor lie, and when?", f"memplan report {BEFORE} --save {plan_file} --html {page}")
    plan.save(plan_file)
    write_atomic(page, plan.to_html())
    write_atomic(still, plan.to_svg())
    for file, what in ((plan_file, "the plan, JSON"), (page, "zoom, hover, who is alive"), (still, "a still picture")):
        say(f"wrote {file}  ({what})")
    _heading(3, "Does it run in exactly that?", "compiled = memplan.compile(model, inputs)")
    _train()
    _heading(4, "What if there is less memory?", f"memplan.compile(model, inputs, arena_budget={SHARE}, costs='a100')")
    write_atomic(less, _within(plan).to_html())
    say(f"wrote {less}  (the same picture, an arrow for everything that leaves and comes back)")
    _heading(5, "What if a change makes it grow?", f"memplan check {AFTER} --baseline ... --fail-over arena:+2%")
    with stages("demo") as tell:
        tell(f"planning {AFTER}")
        after = obtain(AFTER)
    _gate(plan, after)
    say(f"\nDone. Open {page} in a browser; on your own model: memplan report FILE.py:FACTORY --html report.html")


def _require_own(plan_file: Path, *pictures: Path) -> None:
    """Raise `InvalidOutput` unless all files can be written and existing ones come from an earlier demo.

    The model's name in the plan file tells whether they do.
    """
    from memplan.cli.outputs import refused, require_outputs
    from memplan.planning.planfile import load

    files = plan_file, *pictures
    for file in files:
        require_outputs({"--output": file})
    there = next((file for file in files if file.exists()), None)
    try:
        own = there is None or load(plan_file).model == BEFORE
    except MemplanError:
        own = False
    if there is not None and not own:
        raise refused(there, "--output", "is not of an earlier demo", "name another folder")


def _heading(number: int, question: str, command: str) -> None:
    from rich.text import Text

    text = Text.assemble((f"\n{number}. {question}  ", "bold cyan"), (f"$ {command}\n", "dim"))
    console().print(text, soft_wrap=True)


def _train() -> None:
    with stages("demo") as tell:
        tell("training in the arena, and by eager")
        from memplan.demo_model import train

        done = train()
    for step, (eager, planned) in enumerate(zip(done.eager, done.planned, strict=True)):
        say(f"step {step}: loss {planned:.6f} in the arena, {eager:.6f} by eager")
    differ = "losses or parameters DIFFER: please report it"
    say("losses and parameters are equal bit by bit" if done.bitwise else differ)


def _within(plan: Plan) -> Plan:
    """Return the plan with less memory, after printing what that costs."""
    from memplan.core.units import format_exact
    from memplan.evict.costs import DEVICES
    from memplan.planning.budget import plan_within
    from memplan.planning.make_plan import ScheduledGraph
    from memplan.planning.options import PlanOptions
    from memplan.report.lines import budget_lines

    with stages("demo") as tell:
        tell("fitting it; the first time on a machine, this compiles the search")
        kept = plan_within(ScheduledGraph.of(plan), PlanOptions(arena_budget=SHARE), DEVICES["a100"])
    say(f"arena     {format_exact(kept.arena_size)} instead of {format_exact(plan.arena_size)}")
    for line in budget_lines(kept.report()):
        say(line)
    return kept


def _gate(before: Plan, after: Plan) -> None:
    from memplan.analysis.rows import figures_of
    from memplan.check.check import check, parse_rule
    from memplan.report.verdicts import Judged, check_form

    verdict = check(after, [parse_rule("arena:+2%")], figures_of(before))
    show(check_form([Judged(name="demo", verdict=verdict)]), Format.TABLE)
