"""`memplan report`: shows the memory that a model needs, and its largest buffers."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt


def report(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help=c.TARGET)],
    *,
    gpu: c.Gpu = None,
    infer: c.Infer = False,
    ranks: c.Ranks = None,
    form: c.Shown = Format.TABLE,
    save: Annotated[Path | None, opt("--save FILE", "Write the plan itself to FILE, for check.")] = None,
    html: c.Html = None,
    svg: Annotated[Path | None, opt("--svg FILE", "Draw the arena as an SVG picture.")] = None,
    snapshot: Annotated[Path | None, opt("--snapshot FILE", "Write a pickle for PyTorch's memory_viz.")] = None,
    budget: c.Budget = None,
    arena_budget: Annotated[str | None, opt("--arena-budget SIZE", "The same for the arena alone.")] = None,
    host_budget: c.HostBudget = None,
    pinned_budget: c.PinnedBudget = None,
    optimizer: c.Optimizer = "AdamW",
    reserve: c.Reserve = None,
    checkpoint: Annotated[str | None, opt("--checkpoint HOW", "follow (default): drop what eager drops; plan.")] = None,
    kernels: c.Kernels = None,
    gradients: Annotated[str | None, opt("--gradients WHERE", "arena or outside.")] = None,
    costs: c.Costs = None,
    solver: c.Solver = None,
    time_limit: c.TimeLimit = None,
) -> None:
    """Show what a model needs to the byte, and which buffers need it.

    Plans a training step: forward and backward. In eval mode or with --infer: the forward alone.

    Nothing is computed and no weight is touched: the model may be larger than this machine.
    """
    asked = dict(locals())
    from memplan.cli.outputs import require_outputs
    from memplan.cli.source import obtain, require_model
    from memplan.core.files import write_atomic
    from memplan.planning.options import PlanOptions
    from memplan.report.lines import answer_lines, report_form, title

    drawn = {"--html": html, "--svg": svg, "--snapshot": snapshot}
    require_outputs({"--save": save, **drawn}, target, costs)
    known = {field.name for field in fields(PlanOptions)}
    given = {name: value for name, value in asked.items() if name in known and value is not None}
    require_model(target, bool(given or infer or gpu or ranks is not None))  # before their values are checked
    options = PlanOptions.of(given)
    plan = obtain(target, infer=infer, options=options, ranks=ranks, gpu=gpu, optimizer=optimizer)
    figures = plan.report(optimizer=optimizer)
    found = report_form(figures)
    c.stop_if_interrupted()
    if save is not None:
        plan.save(save)
    if any(drawn.values()):
        from memplan.report.memory_viz import snapshot_bytes
        from memplan.report.pages import picture_html
        from memplan.report.picture import picture_of_plan
        from memplan.report.svg import picture_svg

        picture = picture_of_plan(plan, figures)
        if html is not None:
            write_atomic(html, picture_html(picture))
        for path, draw in ((svg, picture_svg), (snapshot, snapshot_bytes)):
            if path is not None:
                write_atomic(path, draw(picture))
    c.show(found, form)
    if form is Format.GITHUB:
        from memplan.report.verdicts import command

        typer.echo(command("notice ", title(figures), " ".join(answer_lines(figures))))
    c.wrote(save, *drawn.values())
