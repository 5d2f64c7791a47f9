"""`memplan demo`: shows the main features on a small model."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli.check import check
from memplan.cli.compare import diff
from memplan.cli.console import console, opt, say, stages
from memplan.cli.report import report
from memplan.errors import MemplanError, UnreadableFile

BEFORE, AFTER = "memplan.demo_model:small", "memplan.demo_model:grown"
SHARE = "60%"


def demo(
    folder: Annotated[Path, opt("--output,-o FOLDER", "Where the plan and the pictures go.")] = Path("memplan-demo"),
) -> None:
    """Show everything once on a small model, in about a minute.

    Plans a transformer, draws it, trains it in its arena next to eager, fits it into less memory, and catches a change
    that makes it grow.
    """
    from memplan.core.arguments import require_torch
    from memplan.planning.planfile import load

    require_torch("memplan demo")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        what = f"cannot be made: {error.strerror}"
        raise UnreadableFile(what, where=str(folder), hint="give --output FOLDER") from error
    plan_file, page = folder / "plan.json", folder / "report.html"
    still, less = folder / "report.svg", folder / "budget.html"
    _require_own(plan_file, page, still, less)
    _heading(1, "What does a training step need?", f"memplan report {BEFORE} --save {plan_file}")
    report(BEFORE, save=plan_file)
    _heading(2, "Where does every tensor lie, and when?", f"memplan report {plan_file} --html {page} --svg {still}")
    report(str(plan_file), html=page, svg=still)
    _heading(3, "Does it run in exactly that?", "compiled = memplan.compile(model, inputs)")
    _train()
    _heading(4, "What if there is less memory?", f"memplan report {BEFORE} --arena-budget {SHARE} --html {less}")
    report(BEFORE, arena_budget=SHARE, costs="a100", html=less)
    most = str(load(plan_file).arena_size)
    _heading(
        5, "What if a change makes it grow?", f"memplan diff {plan_file} {AFTER}; memplan check --max-arena {most}"
    )
    diff(str(plan_file), AFTER)
    with suppress(typer.Exit):
        check([AFTER], max_arena=most)
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
