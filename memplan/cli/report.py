"""`memplan report`: what a model needs, and who holds it."""

from __future__ import annotations

import enum
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.console import console

if TYPE_CHECKING:
    from memplan.report.summary import Report


class Format(enum.StrEnum):
    """How the report is printed."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"


def report(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN", help="FILE.py:FACTORY, package.module:FACTORY or plan.json.")
    ],
    *,
    infer: Annotated[bool, typer.Option("--infer", help="Plan the forward alone, without gradients.")] = False,
    form: Annotated[Format, typer.Option("--format", help="What to print.")] = Format.TABLE,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to FILE, exact, as JSON.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the plan itself to FILE, for check.")
    ] = None,
    solver: Annotated[
        str, typer.Option("--solver", metavar="NAME", help="Which solver places the buffers: auto or its name.")
    ] = "auto",
    time_limit: Annotated[
        float | None, typer.Option("--time-limit", metavar="SECONDS", help="How long the solver may take.")
    ] = None,
) -> None:
    """Show what a model needs to the byte, and which buffers need it.

    Plans a training step: forward and backward. In eval mode or with --infer: the forward alone.

    Nothing is computed and no weight is touched: the model may be larger than this machine.
    """
    from memplan.cli.source import obtain, seconds_option
    from memplan.csvio import write_atomic
    from memplan.report.jsonform import report_json

    plan = obtain(target, infer=infer, solver=solver, time_limit=seconds_option("--time-limit", time_limit))
    figures = plan.report()
    if save is not None:
        plan.save(save)
    if json_file is not None:
        write_atomic(json_file, json.dumps(report_json(figures), indent=2, allow_nan=False) + "\n")
    _print(figures, form)


def _print(figures: Report, form: Format) -> None:
    if form is Format.JSON:
        from memplan.report.jsonform import report_json

        typer.echo(json.dumps(report_json(figures), indent=2, allow_nan=False))
    elif form is Format.MARKDOWN:
        from memplan.report.markdown import report_markdown

        typer.echo(report_markdown(figures), nl=False)
    else:
        from memplan.report.table import ReportTable

        console().print(ReportTable(figures))
