"""`memplan report`: shows the memory that a model needs, and its largest buffers."""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from memplan.cli.console import console, wrote
from memplan.cli.outputs import SOURCE_URL_HELP

if TYPE_CHECKING:
    from memplan.core.choices import Checkpoint, Gradients, Kernels
    from memplan.core.plan import Plan
    from memplan.report.summary import Report


class ReportFormat(enum.StrEnum):
    """The output formats of the report."""

    TABLE = "table"
    MARKDOWN = "markdown"
    JSON = "json"
    GITHUB = "github"


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictures:
    """The files into which the arena is drawn; None for those that are not wanted."""

    html: Path | None = None
    svg: Path | None = None
    png: Path | None = None
    trace: Path | None = None
    snapshot: Path | None = None


def report(
    target: Annotated[
        str, typer.Argument(metavar="MODEL|PLAN", help="FILE.py:FACTORY, package.module:FACTORY or plan.json.")
    ],
    *,
    infer: Annotated[bool, typer.Option("--infer", help="Plan the forward alone, without gradients.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Plan one of N ranks that share the parameters.")
    ] = None,
    form: Annotated[
        ReportFormat, typer.Option("--format", help="What to print; github: also a job summary.")
    ] = ReportFormat.TABLE,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write every figure to FILE, exact, as JSON.")
    ] = None,
    save: Annotated[
        Path | None, typer.Option("--save", metavar="FILE", help="Write the plan itself to FILE, for check.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Draw the arena as one page, to zoom and hover.")
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the arena as an SVG picture.")] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="The same as PNG; needs memplan\\[png].")
    ] = None,
    source_url: Annotated[
        str | None,
        typer.Option("--source-url", metavar="TEMPLATE", help=f"With --html: {SOURCE_URL_HELP}"),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option("--trace", metavar="FILE", help="Write trace events, for ui.perfetto.dev.")
    ] = None,
    snapshot: Annotated[
        Path | None, typer.Option("--snapshot", metavar="FILE", help="Write a pickle for PyTorch's memory_viz.")
    ] = None,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="SIZE", help="Evict what does not fit into the total: 8GiB, 50% or min."),
    ] = None,
    arena_budget: Annotated[
        str | None, typer.Option("--arena-budget", metavar="SIZE", help="The same for the arena alone.")
    ] = None,
    host_budget: Annotated[
        str | None, typer.Option("--host-budget", metavar="SIZE", help="The most bytes of copies on the host.")
    ] = None,
    pinned_budget: Annotated[
        str | None,
        typer.Option("--pinned-budget", metavar="SIZE", help="The same where they are page-locked: for CUDA."),
    ] = None,
    reserve: Annotated[
        str | None,
        typer.Option("--reserve", metavar="SIZE", help="Bytes that the step does not show: optimizer state."),
    ] = None,
    checkpoint: Annotated[
        str,
        typer.Option("--checkpoint", metavar="HOW", help="follow: drop what eager drops; plan: no more bytes, faster."),
    ] = "follow",
    kernels: Annotated[
        str, typer.Option("--kernels", metavar="KIND", help="aten: those of eager; inductor: fused, of torch.compile.")
    ] = "aten",
    gradients: Annotated[
        str,
        typer.Option("--gradients", metavar="WHERE", help="auto, arena: planned; added, safe, owned: outside."),
    ] = "auto",
    costs: Annotated[
        str | None,
        typer.Option("--costs", metavar="DEVICE|FILE", help="The cost model: a100, h100, h200, l4, cpu, a file."),
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
    from memplan.cli.interrupt import stop_if_interrupted
    from memplan.cli.outputs import require_outputs, require_source_url
    from memplan.cli.source import obtain, require_model, seconds_option
    from memplan.core.files import write_atomic
    from memplan.planning.options import PlanOptions
    from memplan.report.summary import report_json

    limit = seconds_option("--time-limit", time_limit)
    pictures = {"--html": html, "--svg": svg, "--png": png, "--trace": trace, "--snapshot": snapshot}
    require_outputs({"--save": save, "--json": json_file, **pictures}, target, costs)
    require_source_url(source_url, html)
    budgets = (budget, arena_budget, host_budget, pinned_budget, reserve)
    words = (gradients, checkpoint, kernels, solver) != ("auto", "follow", "aten", "auto")
    given = (infer, words, *(one is not None for one in (*budgets, costs, limit, ranks)))
    require_model(target, any(given))  # before their values are checked, which would not matter
    options = PlanOptions(
        budget=budget,
        arena_budget=arena_budget,
        host_budget=host_budget,
        pinned_budget=pinned_budget,
        reserve=reserve or 0,
        costs=costs,
        checkpoint=cast("Checkpoint", checkpoint),
        kernels=cast("Kernels", kernels),
        gradients=cast("Gradients", gradients),  # `PlanOptions` refuses any other text
        solver=solver,
        time_limit=limit,
    )
    plan = obtain(target, infer=infer, options=options, ranks=ranks)
    figures = plan.report()
    stop_if_interrupted()
    if save is not None:
        plan.save(save)
    if json_file is not None:
        write_atomic(json_file, json.dumps(report_json(figures), indent=2, allow_nan=False) + "\n")
    wanted = Pictures(html=html, svg=svg, png=png, trace=trace, snapshot=snapshot)
    if wanted != Pictures():
        _draw(plan, wanted, source_url, target)
    _print(figures, form)
    wrote(save, json_file, html, svg, png, trace, snapshot)


def _draw(plan: Plan, wanted: Pictures, source_url: str | None, target: str) -> None:
    """Write the wanted pictures, all from the same `Picture`."""
    from memplan.cli import pictures
    from memplan.cli.source_files import links_of
    from memplan.report.picture import picture_of_plan

    picture = picture_of_plan(plan)
    if wanted.html is not None:
        pictures.write_html(
            wanted.html, picture, links_of((b.holder.source for b in picture.blocks), source_url, target)
        )
    for path, write in (
        (wanted.svg, pictures.write_svg),
        (wanted.png, pictures.write_png),
        (wanted.trace, pictures.write_trace),
        (wanted.snapshot, pictures.write_snapshot),
    ):
        if path is not None:
            write(path, picture)


def _print(figures: Report, form: ReportFormat) -> None:
    if form is ReportFormat.JSON:
        from memplan.report.summary import report_json

        typer.echo(json.dumps(report_json(figures), indent=2, allow_nan=False))
    elif form is ReportFormat.MARKDOWN:
        from memplan.report.markdown import report_markdown

        typer.echo(report_markdown(figures), nl=False)
    else:
        from memplan.report.table import ReportTable

        console().print(ReportTable(figures))
    if form is ReportFormat.GITHUB:
        from memplan.cli.github import add_summary, notice
        from memplan.core.units import format_exact
        from memplan.report.lines import title, verdict
        from memplan.report.markdown import report_markdown

        typer.echo(notice(title(figures), f"arena {format_exact(figures.arena_size)}; {verdict(figures)}"))
        add_summary(report_markdown(figures))
