"""`memplan budget`: the predicted time of a step under each budget, and the smallest budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt

if TYPE_CHECKING:
    from memplan.core.graph import Graph
    from memplan.planning.frontier import Explored, Rival
    from memplan.planning.make_plan import ScheduledGraph


def budget(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help=c.TARGET)],
    *,
    costs: c.Costs = None,
    policy: Annotated[str, opt("--policy NAME", "The policy that decides what is evicted.")] = "auto",
    host_budget: c.HostBudget = None,
    pinned_budget: c.PinnedBudget = None,
    reserve: c.Reserve = None,
    infer: c.Infer = False,
    ranks: c.Ranks = None,
    compare: Annotated[bool, opt("--torch/--no-torch", "Compare models with torch's activation_memory_budget.")] = True,
    form: c.Shown = Format.TABLE,
    html: c.Html = None,
    source_url: c.SourceUrl = None,
) -> None:
    """Show what each memory budget would cost in time.

    For budgets of everything on the device, from what eager needs down to the smallest: what is computed again, what is
    copied to the host and back, and the predicted time of a step. Nothing runs.

    On the page of --html, a point of the curve opens its plan.
    """
    from memplan.cli.outputs import require_outputs, require_source_url
    from memplan.cli.source import is_model, obtain, size_option
    from memplan.core.files import write_atomic
    from memplan.errors import InvalidModel, InvalidPlan
    from memplan.planning.base_graph import without_evictions
    from memplan.planning.frontier import explore
    from memplan.report.forms import frontier_form

    require_outputs({"--html": html}, target, costs)
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
    rivals: tuple[Rival, ...] = ()
    if compare and not infer and ranks is None and is_model(target):
        rivals = _torch(target, costs, plan.alignment, nbytes)
    page = None if html is None else _page(explored, replace(step, reserve=nbytes), rivals, (target, source_url))
    c.stop_if_interrupted()
    if html is not None and page is not None:
        write_atomic(html, page)
    c.wrote(html)
    c.show(frontier_form(plan.model, explored.frontier, rivals), form)


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
    from memplan.cli.source import traced
    from memplan.errors import UnsupportedGraph
    from memplan.evict.costs import cost_model
    from memplan.planning.frontier import Rival

    with traced(target, "Tracing") as named:
        from memplan.trace.torch_budget import torch_points

        try:
            points = torch_points(named.model, named.args, dict(named.kwargs), cost_model(costs), alignment)
        except UnsupportedGraph:  # no backward to divide
            return ()
    return tuple(Rival(name=f"{p.asked:g}", total=p.total + reserve, overhead=p.overhead) for p in points)


def _page(explored: Explored, step: ScheduledGraph, rivals: tuple[Rival, ...], sources: tuple[str, str | None]) -> str:
    """Return the page of a frontier with the plan of each point; `sources` are the target and the template of links."""
    from memplan.cli.outputs import links_of
    from memplan.planning.frontier import plans_of
    from memplan.report.pages import frontier_html
    from memplan.report.picture import picture_of_plan

    target, template = sources
    with c.stages("planning each budget, for the page"):
        plans = plans_of(explored, step)
        pictures = {id(plan): picture_of_plan(plan) for plan in plans if plan is not None}
    links = links_of((b.holder.source for p in pictures.values() for b in p.blocks), template, target)
    drawn = [None if plan is None else pictures[id(plan)] for plan in plans]
    return frontier_html(step.model, explored.frontier, rivals, drawn, links=links)
