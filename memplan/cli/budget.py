"""`memplan budget`: the predicted time of a step under each budget, and the smallest budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli.compare import TARGET, TextFormat, print_sections
from memplan.cli.console import wrote
from memplan.cli.outputs import SOURCE_URL_HELP

if TYPE_CHECKING:
    from memplan.core.graph import Graph
    from memplan.planning.frontier import Explored, Frontier, Rival
    from memplan.planning.make_plan import ScheduledGraph


def budget(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help=TARGET)],
    *,
    costs: Annotated[
        str | None,
        typer.Option(
            "--costs", metavar="DEVICE|FILE", help="a100, h100, h200, l4, cpu or a file; else this machine's."
        ),
    ] = None,
    policy: Annotated[
        str, typer.Option("--policy", metavar="NAME", help="The policy that decides what is evicted.")
    ] = "auto",
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
    infer: Annotated[bool, typer.Option("--infer", help="Plan the forward alone, without gradients.")] = False,
    ranks: Annotated[
        int | None, typer.Option("--ranks", metavar="N", help="Plan one of N ranks that share the parameters.")
    ] = None,
    compare: Annotated[
        bool, typer.Option("--torch/--no-torch", help="Compare with torch's activation_memory_budget (models only).")
    ] = True,
    form: Annotated[TextFormat, typer.Option("--format", help="What to print.")] = TextFormat.TABLE,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Draw the curve as one page, on which a point opens its plan."),
    ] = None,
    source_url: Annotated[
        str | None,
        typer.Option("--source-url", metavar="TEMPLATE", help=f"With --html: {SOURCE_URL_HELP}"),
    ] = None,
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Draw the curve as an SVG picture.")] = None,
    png: Annotated[
        Path | None, typer.Option("--png", metavar="FILE", help="The same as PNG; needs memplan\\[png].")
    ] = None,
) -> None:
    """Show what each memory budget would cost in time.

    For budgets of everything on the device, from what eager needs down to the smallest: what is computed again, what is
    copied to the host and back, and the predicted time of a step. Nothing runs.
    """
    from memplan.cli.interrupt import stop_if_interrupted
    from memplan.cli.outputs import require_outputs, require_source_url
    from memplan.cli.source import is_model, obtain, size_option
    from memplan.core.files import write_atomic
    from memplan.errors import InvalidModel, InvalidPlan
    from memplan.planning.base_graph import without_evictions
    from memplan.planning.frontier import explore
    from memplan.report.frontier_form import frontier_json, frontier_sections, frontier_title

    require_outputs({"--html": html, "--svg": svg, "--png": png}, target, costs)
    require_source_url(source_url, html)
    plan = obtain(target, infer=infer, ranks=ranks)
    try:
        step = without_evictions(plan)
    except InvalidPlan as error:
        what = f"was planned for another device than its model is on: {error.what}"
        raise InvalidModel(what, where=target, hint="give the model, or a plan without device=") from error
    costs = costs or _own_costs(step.graph)
    nbytes = plan.reserve if reserve is None else size_option("--reserve", reserve) or 0
    explored = explore(
        step.graph,
        step.schedule,
        alignment=step.alignment,
        costs=costs,
        policy=policy,
        reserve=nbytes,
        host_budget=size_option("--host-budget", host_budget),
        pinned_budget=size_option("--pinned-budget", pinned_budget),
    )
    found = explored.frontier
    rivals: tuple[Rival, ...] = ()
    if compare and not infer and ranks is None and is_model(target):
        rivals = _torch(target, costs, plan.alignment, nbytes)
    page = None if html is None else _page(explored, replace(step, reserve=nbytes), rivals, (target, source_url))
    stop_if_interrupted()
    _draw(plan.model, found, rivals, svg, png)
    if html is not None and page is not None:
        write_atomic(html, page)
    wrote(html, svg, png)
    sections = frontier_sections(found, rivals)
    print_sections(form, frontier_title(plan.model, found), sections, lambda: frontier_json(found, rivals))


def _own_costs(graph: Graph) -> str:
    """Return the name of the costs of this machine: of its processor, or of the accelerator that the step runs on."""
    from importlib.util import find_spec

    away = sorted({storage.device for storage in graph.storages if not storage.device.startswith("cpu")})
    if not away:
        return "cpu"
    if find_spec("torch") is None:
        return "a100"
    from memplan.trace.planning import device_costs

    return device_costs(away[0])


def _torch(target: str, costs: str, alignment: int, reserve: int) -> tuple[Rival, ...]:
    """Return torch's points of activation_memory_budget; none for a model without a backward."""
    from memplan.cli.source import quiet_stages
    from memplan.errors import UnsupportedGraph
    from memplan.evict.costs import cost_model
    from memplan.planning.frontier import Rival

    with quiet_stages(target) as named:
        from memplan.trace.torch_budget import torch_points

        try:
            points = torch_points(named.model, named.args, dict(named.kwargs), cost_model(costs), alignment)
        except UnsupportedGraph:  # no backward to divide
            return ()
    return tuple(Rival(name=f"{p.asked:g}", total=p.total + reserve, overhead=p.overhead) for p in points)


def _draw(name: str, found: Frontier, rivals: tuple[Rival, ...], svg: Path | None, png: Path | None) -> None:
    from memplan.core.files import write_atomic
    from memplan.report.frontier_form import frontier_svg

    if svg is not None:
        write_atomic(svg, frontier_svg(name, found, rivals))
    if png is not None:
        from memplan.report.png import frontier_png

        write_atomic(png, frontier_png(name, found, rivals))


def _page(explored: Explored, step: ScheduledGraph, rivals: tuple[Rival, ...], sources: tuple[str, str | None]) -> str:
    """Return the page of a frontier with the plan of each point; `sources` are the target and the template of links."""
    from memplan.cli.console import progress
    from memplan.cli.source_files import links_of
    from memplan.planning.frontier import plans_of
    from memplan.report.frontier_page import frontier_html
    from memplan.report.picture import picture_of_plan

    target, template = sources
    with progress("planning each budget, for the page"):
        plans = plans_of(explored, step)
        pictures = {id(plan): picture_of_plan(plan) for plan in plans if plan is not None}
    links = links_of((b.holder.source for p in pictures.values() for b in p.blocks), template, target)
    drawn = [None if plan is None else pictures[id(plan)] for plan in plans]
    return frontier_html(step.model, explored.frontier, rivals, drawn, links=links)
