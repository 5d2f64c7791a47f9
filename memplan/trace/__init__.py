"""Tracing: `nn.Module` + example inputs -> `TracedGraph`, and `plan`, which needs nothing but the trace.

In the order in which data flows: `capture.py` (front ends), `returns.py`, `fold.py`, `simplify.py`, `divide.py`,
`pack.py`, `quantize.py`, `rules.py`, `layer_rules.py` and `products.py` (passes over the fx graph, through
`rewrite.py`), `build.py` (fx graph -> `traced.py`). Nothing is computed here but small constants.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from memplan.division import Divide, Division, compression_of, division_of
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedProblem
from memplan.inplace import with_chances
from memplan.plan import Plan, make_plan
from memplan.schedule import Policy, Schedule
from memplan.schedule import order as order_of
from memplan.schedule.gather import gather
from memplan.solve import Solver
from memplan.trace.build import build
from memplan.trace.capture import Captured, capture
from memplan.trace.divide import divide
from memplan.trace.fold import fold
from memplan.trace.hosted import Target, hosted, require_at_home, target_of
from memplan.trace.pack import pack_masks
from memplan.trace.quantize import quantize
from memplan.trace.returns import own_the_results, tangents_needed, write_back_mutations
from memplan.trace.rewrite import copy_of
from memplan.trace.rules import lower
from memplan.trace.simplify import simplify
from memplan.trace.smaller import plan_divided
from memplan.trace.together import small_updates
from memplan.trace.traced import TracedGraph
from memplan.trace.updates import Accumulate, append_updates, ensure_state, require_supported
from memplan.version import __version__

if TYPE_CHECKING:
    from memplan.budget import Budget
    from memplan.evict.costs import CostModel
    from memplan.evict.workload import Policy as EvictionPolicy

LAYOUTS = ("auto", "tstack")
ARENA = "arena"
GRADIENTS = ("safe", "owned", ARENA)

__all__ = [
    "device_costs",
    "Captured",
    "TracedGraph",
    "alignment_of",
    "capture",
    "plan",
    "plan_traced",
    "trace",
    "trace_captured",
]


def trace(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    in_place: bool = True,
    device: Any = None,
    resident: bool = False,
) -> TracedGraph:
    """Trace one step of `model`; raises `UnsupportedGraph`. `train=None` follows `model.training`.

    `in_place`: let results take the bytes of dying inputs (see `memplan.inplace`). `device`: where the step runs while
    the model and the caller stay on the CPU (see `hosted.py`); raises `UnsupportedDevice`. `resident`: parameters'
    gradients lie in the arena to the end of the step.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    train = bool(getattr(model, "training", True)) if train is None else train
    captured, target = _captured_for(device, model, args, example_kwargs or {}, train=train)
    return _divisible(captured, type(model).__name__, own_the_results, target, in_place=in_place, resident=resident)


def _captured_for(
    device: Any, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool
) -> tuple[Captured, Target | None]:
    """What is captured, as if it were on the device that the user names (None: where it is)."""
    if device is None:
        return capture(model, args, kwargs, train=train), None
    target = target_of(device)
    require_at_home(model, (args, kwargs))
    return capture(model, args, kwargs, train=train, device=target.device), target


def _divisible(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None],
    target: Target | None,
    *,
    in_place: bool,
    resident: bool = False,
) -> TracedGraph:
    """Trace what was captured; the result can be had again with another division or compression."""

    @lru_cache(maxsize=2)
    def make(division: Division | None, compress: str) -> TracedGraph:
        copied = fx.GraphModule(captured.graph_module, copy_of(captured.graph_module.graph))
        whole = replace(captured, graph_module=copied)
        streamed = target is not None
        traced = trace_captured(whole, model, finish, division, compress, resident=resident, streamed=streamed)
        return replace(_finished(traced, target, in_place=in_place), again=make)

    return make(None, "")


def _finished(traced: TracedGraph, target: Target | None, *, in_place: bool) -> TracedGraph:
    traced = traced if target is None else hosted(traced, target)
    return replace(traced, graph=with_chances(traced.graph)) if in_place else traced


def trace_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    example_inputs: tuple[Any, ...],
    *,
    clip_grad_norm: float | None = None,
    accumulate: Accumulate | None = None,
    rates_in_memory: bool = False,
    in_place: bool = True,
    device: Any = None,
) -> TracedGraph:
    """Trace forward, backward and the optimizer's update of a model that returns its loss.

    `accumulate`: what the step does with its gradients when one update takes those of several steps. Creates
    the optimizer's state where it has none yet. `rates_in_memory`: see `append_updates`. `device`: as in `trace`.
    Raises `UnsupportedGraph`.
    """
    require_supported(optimizer)
    captured, target = _captured_for(device, model, example_inputs, {}, train=True)
    ensure_state(optimizer)

    def update(graph: fx.Graph) -> None:
        append_updates(
            graph,
            model,
            optimizer,
            clip_grad_norm=clip_grad_norm,
            accumulate=accumulate,
            rates_in_memory=rates_in_memory,
            device=None if target is None else target.device,
        )

    return _divisible(captured, type(model).__name__, update, target, in_place=in_place)


def trace_graph(module: nn.Module, inputs: tuple[Any, ...], *, train: bool, in_place: bool = True) -> TracedGraph:
    """Trace a graph that dynamo has made of a part of a model, wrapped as a module that keeps its parameters."""
    captured = capture(module, inputs, {}, train=train, by_dynamo=True)
    return _finished(trace_captured(captured, type(module).__name__), None, in_place=in_place)


def trace_captured(
    captured: Captured,
    model: str,
    finish: Callable[[fx.Graph], None] = own_the_results,
    division: Division | None = None,
    compress: str = "",
    *,
    resident: bool = False,
    streamed: bool = False,
) -> TracedGraph:
    """Run the passes over a captured graph (which they change) and read it; `finish` is the last of them.

    `streamed`: what is not planned is on the host, from where a constant would be copied at each use: none is made.
    """
    graph = captured.graph_module.graph
    needs = tangents_needed(graph)
    write_back_mutations(graph, captured.alias_of)
    if not streamed:
        fold(captured.graph_module)
    simplify(graph)
    made = None if division is None else divide(graph, division)
    if compression_of(compress):
        pack_masks(graph)
    if compress == "int8":
        quantize(graph)
    lower(graph, constants=not streamed)
    finish(graph)
    return replace(build(captured, model, needs, resident=resident), division=made, compress=compress)


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
    """`memplan.plan`; the other options are those of `plan_traced`."""
    resident = stay_in_arena(gradients, device=device, budget=options.get("budget"))
    traced = trace(model, example_inputs, example_kwargs, train=train, device=device, resident=resident)
    return plan_traced(traced, **options)


def stay_in_arena(gradients: str, *, device: Any = None, budget: Any = None, **others: Any) -> bool:
    """Whether parameters' gradients are planned. Raises `UnsupportedCall` for options that do not go with that, and
    `MemplanError` for a choice that there is not."""
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
    """Divide a traced step as `divide` allows, order it, evict what does not fit `budget`, and place its storages.

    `redzone` is in bytes (see `lifetimes.problem`), and so is `room` (see `budget.plan_within`); the rest as in
    `memplan.plan`. The plan is of `traced.rewritten(plan.division, plan.compress)`.
    """

    def attempt(step: TracedGraph, limit: Budget | None) -> Plan:
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
    """The plan of a step as it was traced."""
    make = make_plan
    if len(traced.runs_on) > 1:
        from memplan.several import plan_several

        prices = costs or device_costs(traced.device)
        make = partial(plan_several, budget, costs=prices, policy=policy, devices=traced.runs_on)
    elif budget is not None or traced.runs_on:
        from memplan.budget import plan_within  # with the search and its compiler

        prices = costs or device_costs(traced.device)
        make = partial(plan_within, budget, costs=prices, policy=policy, room=room, device="".join(traced.runs_on))
    elif policy != "auto" or costs is not None:
        from memplan.budget import require_known  # a misspelt name is an error, needed or not

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
        return _gathered(traced, order, alignment, plan_of)
    return plan_of(schedule=order)


def _gathered(traced: TracedGraph, order: Schedule, alignment: int, plan_of: Callable[..., Plan]) -> Plan:
    """The plan in which small updates run together, unless its arena is larger than without: max live is not, so that
    an arena of max live bytes is none that the other could undercut."""
    together = gather(traced.graph, order, small_updates(traced), alignment)
    plan = plan_of(schedule=together)
    if together is order or (plan.arena_size == plan.max_live and not plan.redzone):
        return plan
    apart = plan_of(schedule=order)
    return plan if plan.arena_size <= apart.arena_size else apart


def layout_solver(layout: str, solver: str | Solver) -> str | Solver:
    """The solver that makes a layout. Raises `UnsupportedProblem` for a layout that is unknown, or another solver's."""
    if layout not in LAYOUTS:
        raise UnsupportedProblem(f"there is no layout {layout!r}", hint=f"choose one of: {', '.join(LAYOUTS)}")
    if layout == "auto":
        return solver
    if solver not in ("auto", layout):
        what = f"layout={layout!r} is made by the solver of that name, not by {solver!r}"
        raise UnsupportedProblem(what, hint="leave out one of them")
    return layout


def device_costs(device: torch.device) -> str:
    """The cost model (by name) that is nearest to a device."""
    if device.type != "cuda":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower() if torch.cuda.is_available() else ""
    return next((known for known in ("h200", "h100") if known in name), "a100")


def alignment_of(device: torch.device) -> int:
    """Bytes: a cache line, or what CUDA's own allocator rounds to."""
    return 512 if device.type == "cuda" else 64
