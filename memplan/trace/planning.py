"""Plan a traced step, from top to bottom: trace -> schedule -> fit the budget -> place."""

from __future__ import annotations

import logging
import platform
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from memplan.core.collectives import is_collective
from memplan.core.gpus import gpu_called
from memplan.core.plan import Plan
from memplan.core.timed import timed
from memplan.devices.kinds import HOST, alignment_of, is_accelerator, name_of
from memplan.distributed.fake_ranks import divided, fake_ranks
from memplan.errors import BudgetInfeasible
from memplan.evict.costs import cost_model
from memplan.planning.checkpoints import has_checkpoints, plan_checkpointed, plan_from_checkpoints
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.measured import with_temporaries
from memplan.planning.options import DEFAULTS, PlanOptions
from memplan.schedule import order as order_of
from memplan.schedule.group_updates import gather, with_host_early
from memplan.trace.capture.refusals import module_of
from memplan.trace.default_kernels import made_by_default, with_kernels
from memplan.trace.optimizer.host_updates import with_cheapest_updates
from memplan.trace.optimizer.updates import small_updates
from memplan.trace.traced import TracedGraph
from memplan.trace.tracing import CapturedCall, capture_call, retraced
from memplan.trace.variants import first_variant, in_bytes, variants_to_plan
from memplan.version import __version__

_log = logging.getLogger("memplan")


def plan(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    options: PlanOptions = DEFAULTS,
    ranks: int | None = None,
) -> Plan:
    """Return the plan of one step of `model`; see `memplan.plan`."""
    with fake_ranks(ranks):
        planned = model if ranks is None else divided(model)
        options, traced, captured = captured_step(planned, example_inputs, example_kwargs, train, options)
    captured.warn()
    return plan_step(traced, captured, options)[1]


def captured_step(
    model: nn.Module,
    example_inputs: Any,
    example_kwargs: dict[str, Any] | None,
    train: bool | None,
    options: PlanOptions,
) -> tuple[PlanOptions, TracedGraph, CapturedCall]:
    """Return the options with the kernels that a step takes, and the step, traced and captured."""

    def capture(options: PlanOptions) -> tuple[TracedGraph, CapturedCall]:
        """Return the step, traced and captured."""
        captured = capture_call(model, example_inputs, example_kwargs, train=train, **options.tracing)
        return first_variant(captured, options), captured

    model = module_of(model)
    options = with_kernels(options, model, (example_inputs, example_kwargs))
    options, (traced, captured) = made_by_default(options, type(model).__name__, capture)
    return options, traced, captured


def plan_traced(traced: TracedGraph, options: PlanOptions = DEFAULTS, *, redzone: int = 0, room: int = 0) -> Plan:
    """Return the plan of a step as it was traced; the arguments and errors are those of `plan_step`.

    Raises `UnsupportedProblem` if `options` ask for another variant of the step.
    """
    return plan_step(traced, None, options, redzone=redzone, room=room)[1]


def plan_step(
    traced: TracedGraph,
    retracer: CapturedCall | None,
    options: PlanOptions,
    *,
    redzone: int = 0,
    room: int = 0,
    transient: Sequence[int] | None = None,
) -> tuple[TracedGraph, Plan]:
    """Return the variant of a step that fits the budget with the fewest blocks of rows, and its plan.

    Args:
        traced: The step as it was traced first.
        retracer: Traces the other variants that `options` allow; None: there are no others.
        options: Those of `memplan.plan`.
        redzone: The bytes to leave free on both sides of every buffer.
        room: The bytes of an arena that exists already; a plan may use all of them.
        transient: The measured bytes that each op of `traced` allocates outside the arena, for a budget; None: those
            that are known before anything ran.

    Raises:
        BudgetInfeasible: No variant of the step fits the budget. Without `divide=`, the hint says what it would bring.
        UnsupportedProblem: `options` ask for another variant, and there is no retracer.
    """
    alignment = alignment_of(traced.device)
    generator = retracer if options.kernels == "inductor" else None
    limited = options.budget is not None or options.arena_budget is not None
    within = in_bytes(options, traced, alignment) if generator is not None and limited else options
    if generator is None:
        traced = retraced(traced, retracer, traced.division, options.compression)
    variants, within = variants_to_plan(traced, retracer, within, alignment)

    def make(variant: TracedGraph) -> Plan:
        """Return the plan of a variant."""
        with timed(f"planning {len(variant.graph.ops):,} ops of {variant.model}"):
            return _plan_variant(variant, within, redzone=redzone, room=room, transient=transient)

    failed: BudgetInfeasible | None = None
    for variant in variants:
        try:
            made = make(variant)
            if retracer is not None and len(variant.runs_on) == 1:  # it is decided once, with the variant
                costs = cost_model(options.costs or device_costs(variant.device))
                variant, made = with_cheapest_updates(variant, made, costs, make)  # noqa: PLW2901
            made = replace(made, division=variant.division, compress=variant.compress, kernels=variant.attention)
            return variant, made
        except BudgetInfeasible as error:
            failed = error
    assert failed is not None
    if retracer is not None and options.division is None:
        asked = "True" if generator is None else "memplan.Division(sums=True)"
        failed.hint = f"{failed.hint}; divide={asked} may need less"
    raise failed


def _plan_variant(
    traced: TracedGraph, options: PlanOptions, *, redzone: int, room: int, transient: Sequence[int] | None
) -> Plan:
    """Return the plan of one variant of a step: ordered, then evicted or divided among devices, and placed."""
    scheduled = ScheduledGraph(
        model=traced.model,
        graph=traced.graph,
        schedule=with_host_early(traced.graph, order_of(traced.graph, options.schedule)),
        alignment=alignment_of(traced.device),
        versions=versions(),
        redzone=redzone,
        reserve=options.reserved,
    )
    overlaps = not traced.runs_on and any(is_collective(op.target) for op in traced.graph.ops)
    if overlaps:
        from memplan.planning.overlapped import with_hidden_collectives, with_overlap

        costs = cost_model(options.costs or device_costs(traced.device))
        asked, options = options, with_hidden_collectives(traced.graph, options, costs)
    if options.has_budget or traced.runs_on:
        made = _plan_with_transfers(traced, scheduled, options, room, transient)
    elif has_checkpoints(traced.graph):
        made = _plan_with_checkpoints(traced, scheduled, options, transient)
    elif options.schedule != "auto":
        made = make_plan(scheduled, options)
    else:
        made = _plan_with_grouped_updates(traced, scheduled, options)
    return with_overlap(scheduled, made, asked, costs) if overlaps else made


def _plan_with_transfers(
    traced: TracedGraph,
    scheduled: ScheduledGraph,
    options: PlanOptions,
    room: int,
    transient: Sequence[int] | None,
) -> Plan:
    """Return the plan of a step with a budget, or of one that runs on other devices than its model is on."""
    costs = cost_model(options.costs or device_costs(traced.device))
    if len(traced.runs_on) > 1:
        if not options.has_budget and has_checkpoints(traced.graph):
            _log.warning("activation checkpoints are not followed on several devices; give a budget for each instead")
        from memplan.planning.multi_device import plan_several

        return plan_several(scheduled, options, costs, devices=traced.runs_on, transient=transient)
    from memplan.planning.budget import plan_within  # imports the search and its compiler

    followed = has_checkpoints(traced.graph) and not traced.runs_on
    return plan_within(
        scheduled,
        options,
        costs,
        room=room,
        device="".join(traced.runs_on),
        transient=transient,
        free=partial(_plan_with_checkpoints, traced, scheduled, options, transient) if followed else None,
    )


def _plan_with_checkpoints(
    traced: TracedGraph, scheduled: ScheduledGraph, options: PlanOptions, transient: Sequence[int] | None
) -> Plan:
    """Return the plan of a step with activation checkpoints and no budget on its device."""
    costs = cost_model(options.costs or device_costs(traced.device))
    make = plan_checkpointed if options.checkpoint == "follow" else plan_from_checkpoints
    made = make(scheduled, replace(options, budget=None, arena_budget=None), costs)
    return made if transient is None else with_temporaries(made, transient)


def _plan_with_grouped_updates(traced: TracedGraph, scheduled: ScheduledGraph, options: PlanOptions) -> Plan:
    """Return the plan in which small updates run together, or the plan without that where its arena is smaller.

    Grouping never raises max live, so an arena of exactly max live bytes needs no comparison.
    """
    grouped = gather(traced.graph, scheduled.schedule, small_updates(traced), scheduled.alignment)
    plan = make_plan(replace(scheduled, schedule=grouped), options)
    if grouped is scheduled.schedule or (plan.arena_size == plan.max_live and not plan.redzone):
        return plan
    ungrouped = make_plan(scheduled, options)
    return plan if plan.arena_size <= ungrouped.arena_size else ungrouped


def device_costs(device: torch.device | str) -> str:
    """Return the name of the cost model of a device; "a100", which the log says, for one without."""
    device = torch.device(device)
    if not is_accelerator(device):
        return HOST
    return _costs_called(name_of(device) or device.type)


@cache  # a line of the log once
def _costs_called(name: str) -> str:
    if (gpu := gpu_called(name)) is not None:
        return gpu.costs
    _log.info("no cost model of %s is known: times are predicted with those of an A100; costs= names another", name)
    return "a100"


def versions() -> dict[str, str]:
    """Return the versions of memplan, torch and Python, for the record of a plan."""
    return {"memplan": __version__, "torch": torch.__version__, "python": platform.python_version()}
