"""Checks a plan read from a file: every part must follow from its graph."""

from __future__ import annotations

from memplan.core import lifetimes
from memplan.core.evictions import DeviceArena, check_record
from memplan.core.graph import Graph, check_graph
from memplan.core.happens_before import require_no_races
from memplan.core.legal_orders import require_legal
from memplan.core.plan import Plan
from memplan.core.problem import Solution, Status
from memplan.core.schedule import Schedule, live_bytes, working_set_bound
from memplan.core.totals import page_locked
from memplan.core.validate import validate
from memplan.core.written_first import require_written_first
from memplan.errors import InvalidPlan
from memplan.schedule.evidence import require_evidence


def check_consistency(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless every part of `plan` follows from its graph.

    It runs on every plan read from a file. It does not prove two kinds of bounds, which `as_loaded` marks as claimed.
    """
    check_graph(plan.graph)
    require_legal(plan.graph, plan.schedule.order)
    require_written_first(plan.graph, plan.schedule.order)
    _check_schedule(plan.graph, plan.schedule)
    if plan.alignment < 1 or plan.redzone < 0 or plan.redzone % plan.alignment:
        raise InvalidPlan(f"alignment {plan.alignment}, red zone {plan.redzone}", where="alignment")
    if plan.problem != lifetimes.problem(plan.graph, plan.schedule, alignment=plan.alignment, redzone=plan.redzone):
        raise InvalidPlan("does not follow from the graph and the schedule", where="problem")
    if plan.temporaries is not None and (
        len(plan.temporaries) != len(plan.graph.ops) or min(plan.temporaries, default=0) < 0
    ):
        raise InvalidPlan("needs one number of bytes per op", where="temporaries")
    if plan.solution.status not in (Status.OPTIMAL, Status.FEASIBLE):
        raise InvalidPlan(f"is {plan.solution.status.name.lower()}", where="solution.status")
    if plan.reserve < 0:
        raise InvalidPlan(f"{plan.reserve} bytes are less than none", where="reserve")
    if plan.numbers < 0:
        raise InvalidPlan(f"{plan.numbers} bytes are less than none", where="numbers")
    validate(plan.problem, plan.solution)
    if plan.eviction is not None:
        check_record(plan.graph, plan.eviction)
        validate(lifetimes.host_problem(plan.graph, plan.schedule, alignment=plan.alignment), plan.eviction.host)
        check_sections(plan)
        require_budget(plan)
    require_no_races(plan)


def check_sections(plan: Plan) -> None:
    """Raise `InvalidPlan` or `InvalidSolution` unless the arenas of several devices are contiguous, and each has its
    stated size and exactly the buffers of its device."""
    planned = {s.device for s in plan.graph.storages if s.planned}
    if not plan.devices:
        if len(planned) > 1:
            raise InvalidPlan(f"has no arena for each of {', '.join(sorted(planned))}", where="eviction.sections")
        return
    start = 0
    for i, section in enumerate(plan.devices):
        where = f"eviction.sections[{i}]"
        if section.start != start or section.device in {s.device for s in plan.devices[:i]}:
            raise InvalidPlan("does not start where the one before it ends, or is of the same device", where=where)
        start += section.size
        part = lifetimes.device_problem(plan.problem, plan.graph, section.device)
        if section.max_live != part.max_live or not _keeps(plan, section):
            raise InvalidPlan(f"has not {section.max_live} bytes alive, or more than its budget", where=where)
        offsets = {b.id: plan.solution.offsets[b.id] - section.start for b in part.buffers}
        low = part.max_live if plan.solution.status is Status.OPTIMAL else 0
        status = Status.OPTIMAL if low == section.size else Status.FEASIBLE
        validate(
            part, Solution(offsets=offsets, arena_size=section.size, status=status, bound=low, solver="", seconds=0.0)
        )
    if start != plan.arena_size or planned - {section.device for section in plan.devices}:
        raise InvalidPlan("do not hold the whole plan", where="eviction.sections")


def require_budget(plan: Plan) -> None:
    """Raise `InvalidPlan` if the plan exceeds one of its budgets. Plans with red zones, which are for tests, may."""
    if plan.eviction is None or plan.redzone:
        return
    kept = plan.eviction
    locked = page_locked(plan.host_size) if plan.pinned else 0
    budget = None if plan.devices else kept.budget  # those of several devices are checked one by one
    for name, part, nbytes, limit in (
        ("arena_budget", "the arena", plan.arena_size, kept.arena_budget),
        ("budget", "the total", plan.on_device, budget),
        ("host_budget", "what is copied to the host", plan.host_size, kept.host_budget),
        ("pinned_budget", "what is locked for that", locked, kept.pinned_budget),
    ):
        if limit is not None and nbytes > limit:
            raise InvalidPlan(
                f"{part} of {nbytes} bytes is larger than its budget of {limit}", where=f"eviction.{name}"
            )


def _keeps(plan: Plan, section: DeviceArena) -> bool:
    """Return whether the arena of one of several devices, and all that is on that device, keep their budgets."""
    within = section.budget is None or plan.on_section(section) <= section.budget
    return bool(plan.redzone) or (section.size <= section.arena_budget and within)


def _check_schedule(graph: Graph, schedule: Schedule) -> None:
    measured = max(live_bytes(graph, schedule.order), default=0)
    if schedule.max_live != measured:
        raise InvalidPlan(f"says {schedule.max_live}, its order has {measured}", where="schedule.max_live")
    if not working_set_bound(graph) <= schedule.bound <= measured:
        raise InvalidPlan(
            f"{schedule.bound} is not between the largest working set and max live", where="schedule.bound"
        )
    require_evidence(graph, schedule)
