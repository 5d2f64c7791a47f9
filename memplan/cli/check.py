"""`memplan check`: fail the build that needs more than it may."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.console import console

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from memplan.check import Finding, Verdict


def check(
    targets: Annotated[
        list[str], typer.Argument(metavar="PLAN|MODEL", help="plan.json, FILE.py:FACTORY or package.module:FACTORY.")
    ],
    *,
    max_arena: Annotated[
        str | None, typer.Option("--max-arena", metavar="SIZE", help="Most bytes of the arena, as 3GiB.")
    ] = None,
    max_fragmentation: Annotated[
        str | None,
        typer.Option("--max-fragmentation", metavar="SHARE", help="Most of the arena that is lost, as 0.02 or 2%."),
    ] = None,
    max_outside: Annotated[
        str | None,
        typer.Option(
            "--max-outside", metavar="SIZE", help="Most bytes outside the arena: all that the total has beyond it."
        ),
    ] = None,
    infer: Annotated[bool, typer.Option("--infer", help="Plan the forward of a model alone.")] = False,
) -> None:
    """Fail when a plan or a model needs more than it may.

    Exits 1 when a limit is exceeded, and shows by how much and which buffers explain it.

    A figure that is equal to its limit keeps it. Saved plans are checked without torch.
    """
    from memplan.check import Limits
    from memplan.check import check as check_plan
    from memplan.cli.source import is_model, obtain, share_option, size_option
    from memplan.errors import InvalidSize

    limits = Limits(
        max_arena=size_option("--max-arena", max_arena),
        max_fragmentation=share_option("--max-fragmentation", max_fragmentation),
        max_outside=size_option("--max-outside", max_outside),
    )
    if limits.is_empty:
        raise InvalidSize("no limit is given", hint="add --max-arena, --max-fragmentation or --max-outside")
    # --infer is for the models among the targets; saved plans are what they are.
    plans = ((target, obtain(target, infer=infer and is_model(target))) for target in targets)
    verdicts = [(target, check_plan(plan, limits)) for target, plan in plans]
    _print(verdicts)
    if not all(verdict.ok for _, verdict in verdicts):
        raise typer.Exit(1)


def _print(verdicts: list[tuple[str, Verdict]]) -> None:
    from rich.text import Text

    from memplan.report.table import new_table

    screen = console()
    table = new_table()
    for name in ("", "plan", "of", "measured", "limit", "too much"):
        table.add_column(
            name, overflow="fold", justify="right" if name in ("measured", "limit", "too much") else "left"
        )
    for target, verdict in verdicts:
        for finding in verdict.findings:
            mark = Text("ok", "green") if finding.ok else Text("FAIL", "bold red")
            table.add_row(mark, _literal(target), finding.name, *map(Text, finding.texts()))
    screen.print(table)
    for target, verdict in verdicts:
        _explain(target, verdict, screen)


def _explain(target: str, verdict: Verdict, screen: Console) -> None:
    """Who holds what exceeds the limits of one plan; findings with the same answer share it."""
    shown: list[Finding] = []
    for finding in verdict.findings:
        same = any((finding.because, finding.parts) == (other.because, other.parts) for other in shown)
        if not finding.ok and not same:
            screen.print()
            screen.print(_explained(target, finding, screen.width))
            shown.append(finding)


def _literal(text: str) -> RenderableType:
    from rich.text import Text

    from memplan.report.lines import printable

    return Text(printable(text))


def _explained(target: str, finding: Finding, width: int) -> RenderableType:
    """The buffers or the kinds that hold most of what exceeds the limit."""
    from rich.text import Text

    from memplan.report.table import headed, holders_table, new_table
    from memplan.units import format_exact

    if finding.because:
        heading = f"{target}: largest buffers alive at the peak"
        return holders_table(heading, finding.because, width)
    table = new_table()
    table.add_column("kind")
    table.add_column("size", justify="right")
    for name, size in finding.parts:
        table.add_row(Text(name), Text(format_exact(size)))
    return headed(f"{target}: what lies outside the arena", table)
