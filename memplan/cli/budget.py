"""`memplan budget`: the predicted time of a step under each budget, and the smallest budget."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from memplan.cli import console as c
from memplan.cli.console import Format, opt

if TYPE_CHECKING:
    from memplan.core.graph import Graph
    from memplan.core.plan import Plan
    from memplan.planning.frontier import Frontier
    from memplan.report.sections import Form

_ALMOST_ALL = 0.999  # of what eager needs: the step as it is under a budget, for which nothing has to be evicted


def budget(
    target: Annotated[str, typer.Argument(metavar="MODEL|PLAN", help=c.TARGET)],
    *,
    gpu: c.Gpu = None,
    costs: c.Costs = None,
    policy: Annotated[str, opt("--policy NAME", "The policy that decides what is evicted.")] = "auto",
    host_budget: c.HostBudget = None,
    pinned_budget: c.PinnedBudget = None,
    optimizer: c.Optimizer = "AdamW",
    reserve: c.Reserve = None,
    infer: c.Infer = False,
    ranks: c.Ranks = None,
    form: c.Shown = Format.TABLE,
    html: c.Html = None,
) -> None:
    """Show what each memory budget would cost in time.

    For budgets of everything on the device, from what eager needs down to the smallest: what is computed again, what is
    copied to the host and back, and the predicted time of a step. Nothing runs.

    On the page of --html, a point of the curve opens its plan.
    """
    from memplan.analysis.needs import named_optimizer, state_beside
    from memplan.cli.outputs import require_outputs
    from memplan.cli.source import obtain, size_option
    from memplan.core.files import write_atomic
    from memplan.core.gpus import find_gpu
    from memplan.errors import BudgetInfeasible, InvalidModel, InvalidPlan
    from memplan.planning.base_graph import without_evictions
    from memplan.planning.frontier import frontier
    from memplan.planning.options import DEFAULTS, PlanOptions
    from memplan.report.forms import frontier_form

    require_outputs({"--html": html}, target, costs)
    under = DEFAULTS if gpu is None else PlanOptions(budget=_ALMOST_ALL)
    try:
        plan = obtain(target, infer=infer, ranks=ranks, gpu=gpu, options=under)
    except BudgetInfeasible:  # nearly all of a small step is the workspace
        plan = obtain(target, infer=infer, ranks=ranks, gpu=gpu)
    try:
        step = without_evictions(plan)
    except InvalidPlan as error:
        what = f"was planned for another device than its model is on: {error.what}"
        raise InvalidModel(what, where=target, hint="give the model, or a plan without device=") from error
    there = find_gpu(plan.versions["target"], quiet=True) if "target" in plan.versions else None
    costs = costs or (there.costs if there else _own_costs(step.graph))
    name = named_optimizer(optimizer)
    state = state_beside(plan, name)
    asked = size_option("--reserve", reserve)
    nbytes = plan.reserve + state if asked is None else asked + (there.workspace if there else 0)
    options = PlanOptions(policy=policy, reserve=nbytes, host_budget=host_budget, pinned_budget=pinned_budget)
    blocks = (plan.division.blocks if plan.division else None) or 0
    found = frontier(replace(step, reserve=nbytes), options, costs=costs, eager=_whole_eager(plan), blocks=blocks)
    shown = frontier_form(plan.model, found, name if state and asked is None else "")
    page = None if html is None else _page(shown, found)
    c.stop_if_interrupted()
    if html is not None and page is not None:
        write_atomic(html, page)
    c.wrote(html)
    c.show(shown, form)


def _whole_eager(plan: Plan) -> int | None:
    """Return what eager needs with its loss head in one piece; None where the graph of the plan has it so."""
    if plan.division is None or plan.eviction is None or plan.eviction.budget is None:
        return None
    return round(plan.eviction.budget / _ALMOST_ALL) - plan.reserve


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


def _page(form: Form, found: Frontier) -> str:
    """Return the page of a frontier with the plan of each point."""
    from memplan.report.pages import frontier_html
    from memplan.report.picture import picture_of_plan

    plans = {id(p.plan): picture_of_plan(p.plan) for p in found.points if p.plan is not None}
    return frontier_html(form, found, [plans.get(id(p.plan)) for p in found.points])
