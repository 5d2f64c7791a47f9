"""Plan a traced step: divide it where the budget asks for that, order its ops, evict, and place its storages."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.division import Divide, compression_of, division_of
from memplan.core.plan import Plan
from memplan.core.schedule import Schedule
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedProblem
from memplan.planning.checkpoints import has_checkpoints
from memplan.planning.make_plan import make_plan
from memplan.schedule import Policy
from memplan.schedule import order as order_of
from memplan.schedule.group_updates import gather
from memplan.solvers import Solver
from memplan.trace.chunking.chunk_search import plan_divided
from memplan.trace.optimizer.update_groups import small_updates
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import trace
from memplan.version import __version__

if TYPE_CHECKING:
    from memplan.evict.costs import CostModel
    from memplan.evict.workload import Policy as EvictionPolicy
    from memplan.planning.budget import Budget

LAYOUTS = ("auto", "tstack")
ARENA = "arena"
GRADIENTS = ("safe", "owned", ARENA)


def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    device: Any = None,
    gradients: str = "safe",
    **options: Any,
) -> Plan:
    """Return the plan of one step of `model`; see `memplan.plan`. `options` are those of `plan_traced`."""
    resident = stay_in_arena(gradients, device=device, budget=options.get("budget"))
    traced = trace(model, example_inputs, example_kwargs, train=train, device=device, resident=resident)
    return plan_traced(traced, **options)


def stay_in_arena(gradients: str, *, device: Any = None, budget: Any = None, **others: Any) -> bool:
    """Return whether parameters' gradients are planned, that is, whether `gradients` is "arena".

    Raises `UnsupportedCall` for an option that cannot be combined with that, and `MemplanError` for an unknown choice.
    """
    if gradients not in GRADIENTS:
        hint = f"choose one of: {', '.join(map(repr, GRADIENTS))}"
        raise MemplanError(f"gradients={gradients!r}", hint=hint)
    if gradients != ARENA:
        return False
    for name, option in {"device": device, "budget": budget, **others}.items():
        if option is not None and option is not False:
            what = f"gradients={ARENA!r} is not supported with it"
            raise UnsupportedCall(what, where=f"{name}={option!r}", hint="leave out one of them, or use compile_step")
    return True


def plan_traced(
    traced: TracedGraph,
    *,
    schedule: str | Policy = "auto",
    solver: str | Solver = "auto",
    layout: str = "auto",
    time_limit: float | None = None,
    redzone: int = 0,
    budget: Budget | None = None,
    policy: str | EvictionPolicy = "auto",
    costs: CostModel | str | None = None,
    divide: Divide = None,
    compress: str | None = None,
    room: int = 0,
) -> Plan:
    """Return the plan of a traced step: divided as `divide` allows, ordered, evicted to fit `budget`, and placed.

    `redzone` is in bytes (see `lifetimes.problem`), and so is `room` (see `budget.plan_within`); the other options are
    those of `memplan.plan`. The plan is of `traced.rewritten(plan.division, plan.compress)`.
    """

    def attempt(step: TracedGraph, limit: Budget | None) -> Plan:
        """Return the plan of `step` within `limit`."""
        made = _plan_whole(
            step,
            schedule=schedule,
            solver=layout_solver(layout, solver),
            time_limit=time_limit,
            redzone=redzone,
            budget=limit,
            policy=policy,
            costs=costs,
            room=room,
        )
        return replace(made, division=step.division, compress=step.compress)

    traced = traced.rewritten(traced.division, compression_of(compress))
    return plan_divided(traced, division_of(divide), attempt, budget, alignment_of(traced.device), schedule)


def _plan_whole(
    traced: TracedGraph,
    *,
    schedule: str | Policy,
    solver: str | Solver,
    time_limit: float | None,
    redzone: int,
    budget: Budget | None,
    policy: str | EvictionPolicy,
    costs: CostModel | str | None,
    room: int,
) -> Plan:
    """Return the plan of a step as it was traced, without dividing it further."""
    make = make_plan
    if len(traced.runs_on) > 1:
        from memplan.planning.multi_device import plan_several

        prices = costs or device_costs(traced.device)
        make = partial(plan_several, budget, costs=prices, policy=policy, devices=traced.runs_on)
    elif budget is not None or traced.runs_on:
        from memplan.planning.budget import plan_within  # imports the search and its compiler

        prices = costs or device_costs(traced.device)
        make = partial(plan_within, budget, costs=prices, policy=policy, room=room, device="".join(traced.runs_on))
    elif has_checkpoints(traced.graph):
        from memplan.planning.checkpoints import plan_checkpointed

        make = partial(plan_checkpointed, costs=costs or device_costs(traced.device), reorder=schedule)
    elif policy != "auto" or costs is not None:
        from memplan.planning.budget import require_known  # a misspelt name is an error even where it is not used

        require_known(policy, costs)
    order, alignment = order_of(traced.graph, schedule), alignment_of(traced.device)
    plan_of = partial(
        make,
        model=traced.model,
        graph=traced.graph,
        alignment=alignment,
        redzone=redzone,
        versions={"memplan": __version__, "torch": torch.__version__, "python": platform.python_version()},
        solver=solver,
        time_limit=time_limit,
    )
    if make is make_plan and schedule == "auto":
        return _with_grouped_updates(traced, order, alignment, plan_of)
    return plan_of(schedule=order)


def _with_grouped_updates(traced: TracedGraph, order: Schedule, alignment: int, plan_of: Callable[..., Plan]) -> Plan:
    """Return the plan in which small updates run together, or the plan without that where its arena is smaller.

    Grouping never raises max live, so an arena of exactly max live bytes needs no comparison.
    """
    grouped = gather(traced.graph, order, small_updates(traced), alignment)
    plan = plan_of(schedule=grouped)
    if grouped is order or (plan.arena_size == plan.max_live and not plan.redzone):
        return plan
    ungrouped = plan_of(schedule=order)
    return plan if plan.arena_size <= ungrouped.arena_size else ungrouped


def layout_solver(layout: str, solver: str | Solver) -> str | Solver:
    """Return the solver that makes a layout.

    Raises `UnsupportedProblem` for an unknown layout, or a layout that another solver makes.
    """
    if layout not in LAYOUTS:
        raise UnsupportedProblem(f"there is no layout {layout!r}", hint=f"choose one of: {', '.join(LAYOUTS)}")
    if layout == "auto":
        return solver
    if solver not in ("auto", layout):
        what = f"layout={layout!r} is made by the solver of that name, not by {solver!r}"
        raise UnsupportedProblem(what, hint="leave out one of them")
    return layout


def device_costs(device: torch.device) -> str:
    """Return the name of the cost model that is nearest to a device."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower() if torch.cuda.is_available() else ""
    return next((known for known in ("h200", "h100") if known in name), "a100")


def alignment_of(device: torch.device) -> int:
    """Return the alignment of buffers on a device, in bytes: a cache line, or what CUDA's own allocator rounds to."""
    return 512 if device.type == "cuda" else 64
