"""`memplan report`: shows the memory that a model needs, and its largest buffers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt

if TYPE_CHECKING:
    from memplan.core.choices import Checkpoint, Gradients, Kernels


def report(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help=c.TARGET)],
    *,
    infer: c.Infer = False,
    ranks: c.Ranks = None,
    form: c.Shown = Format.TABLE,
    json_file: Annotated[Path | None, opt("--json FILE", "Write every figure to FILE, exact, as JSON.")] = None,
    save: Annotated[Path | None, opt("--save FILE", "Write the plan itself to FILE, for check.")] = None,
    html: c.Html = None,
    source_url: c.SourceUrl = None,
    svg: Annotated[Path | None, opt("--svg FILE", "Draw the arena as an SVG picture.")] = None,
    trace: Annotated[Path | None, opt("--trace FILE", "Write trace events, for ui.perfetto.dev.")] = None,
    snapshot: Annotated[Path | None, opt("--snapshot FILE", "Write a pickle for PyTorch's memory_viz.")] = None,
    budget: Annotated[str | None, opt("--budget SIZE", "Evict what exceeds this total: 8GiB, 50% or min.")] = None,
    arena_budget: Annotated[str | None, opt("--arena-budget SIZE", "The same for the arena alone.")] = None,
    host_budget: c.HostBudget = None,
    pinned_budget: c.PinnedBudget = None,
    reserve: c.Reserve = None,
    checkpoint: Annotated[str, opt("--checkpoint HOW", "follow: drop what eager drops; plan: faster.")] = "follow",
    kernels: Annotated[str, opt("--kernels KIND", "aten: those of eager; inductor: fused ones.")] = "aten",
    gradients: Annotated[str, opt("--gradients WHERE", "auto, arena: planned; else outside.")] = "auto",
    costs: c.Costs = None,
    solver: c.Solver = "auto",
    time_limit: c.TimeLimit = None,
) -> None:
    """Show what a model needs to the byte, and which buffers need it.

    Plans a training step: forward and backward. In eval mode or with --infer: the forward alone.

    Nothing is computed and no weight is touched: the model may be larger than this machine.
    """
    from memplan.cli.outputs import links_of, require_outputs, require_source_url
    from memplan.cli.source import obtain, require_model, seconds_option
    from memplan.core.files import write_atomic
    from memplan.planning.options import PlanOptions
    from memplan.report.lines import report_form, title, verdict

    limit = seconds_option("--time-limit", time_limit)
    drawn = {"--html": html, "--svg": svg, "--trace": trace, "--snapshot": snapshot}
    require_outputs({"--save": save, "--json": json_file, **drawn}, target, costs)
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
    found = report_form(figures)
    c.stop_if_interrupted()
    if save is not None:
        plan.save(save)
    if json_file is not None:
        write_atomic(json_file, json.dumps(found.data, indent=2, allow_nan=False) + "\n")
    if any(drawn.values()):
        from memplan.report.pages import picture_html
        from memplan.report.picture import picture_of_plan
        from memplan.report.svg import picture_svg
        from memplan.report.trace_events import snapshot_bytes, trace_json

        picture = picture_of_plan(plan)
        if html is not None:
            links = links_of((b.holder.source for b in picture.blocks), source_url, target)
            write_atomic(html, picture_html(picture, links=links))
        for path, draw in ((svg, picture_svg), (trace, trace_json), (snapshot, snapshot_bytes)):
            if path is not None:
                write_atomic(path, draw(picture))
    c.show(found, form)
    if form is Format.GITHUB:
        from memplan.core.units import format_exact
        from memplan.report.verdicts import command

        text = f"arena {format_exact(figures.arena_size)}; {verdict(figures)}"
        typer.echo(command("notice ", title(figures), text))
    c.wrote(save, json_file, *drawn.values())
