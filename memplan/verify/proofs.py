"""Repeats the proof of each claim of a plan, and reports how it ended."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from memplan.core import lifetimes
from memplan.core.happens_before import follow, has_copies
from memplan.core.plan import Plan
from memplan.core.schedule import Evidence, Schedule
from memplan.core.units import format_exact
from memplan.solvers import solve
from memplan.verify.cut import between_phases, least_at


class ProofState(enum.StrEnum):
    """The result of a proof."""

    PROVEN = "proven"
    CLAIMED = "claimed"
    FALSE = "false"


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A claim of a plan, and whether it was proven again.

    `of` is "order" (no order of the ops needs less than `bound` bytes, without alignment), "layout" (no layout in this
    order does) or "races" (of a plan with copies: at most `bound` pairs of uses of a byte are in no order: 0). `how`
    names the method that proved or refuted it, or says why neither happened. `independent`: the method shares no code
    with memplan's first proof.
    """

    of: str
    state: ProofState
    bound: int
    how: str
    independent: bool

    @property
    def ok(self) -> bool:
        """Whether the claim was proven again."""
        return self.state is ProofState.PROVEN

    @property
    def text(self) -> str:
        """The claim, the result of its proof and the method, in one line."""
        what = "order of its ops" if self.of == "order" else "layout in its order"
        least, race = (
            f"no {what} needs less than {format_exact(self.bound)}",
            "no copy races with an op or another copy",
        )
        said = race if self.of == "races" else least
        heads = {
            ProofState.PROVEN: f"proven again: {said}",
            ProofState.CLAIMED: f"claimed, and not proved again: {said}",
            ProofState.FALSE: f"not true: that {said}",
        }
        return f"{heads[self.state]}; {self.how}"


def verify(plan: Plan, time_limit: float | None = None) -> tuple[Proof, ...]:
    """Prove the claims of `plan` about all orders and all layouts again, even if they were proven when it was loaded;
    of a plan with copies also that nothing races.

    Cuts are found by networkx. A layout is proven by solving again, for at most `time_limit` seconds (None: within the
    solver's own limits).
    """
    return _order(plan), _layout(plan, time_limit), *((_races(plan),) if has_copies(plan) else ())


def _order(plan: Plan) -> Proof:
    graph, schedule = plan.graph, plan.schedule
    if schedule.evidence is Evidence.BETWEEN:
        return _by_cut(schedule, between_phases(graph), "what is alive between forward and backward", "a sum")
    if not graph.ops:
        return _by_cut(schedule, 0, "no op", "a sum")
    op = next(index for index, op in enumerate(graph.ops) if op.name == schedule.proof)
    return _by_cut(schedule, least_at(graph, op), f"the minimum cut at {schedule.proof}", "networkx's minimum_cut")


def _by_cut(schedule: Schedule, least: int, what: str, by: str) -> Proof:
    """Return the proof of the bound by the least bytes at one point, which were found independently."""
    how = f"by {what}: {format_exact(least)}, by {by}, independent of what proved it first"
    state = ProofState.PROVEN if least >= schedule.bound else ProofState.FALSE
    return Proof(of="order", state=state, bound=schedule.bound, how=how, independent=True)


def _layout(plan: Plan, seconds: float | None) -> Proof:
    bound, what = plan.solution.bound, "max live, what is alive together"
    if bound <= plan.max_live:
        how = f"by {what}: {format_exact(plan.max_live)}"
        return Proof(of="layout", state=ProofState.PROVEN, bound=bound, how=how, independent=True)
    devices = [section.device for section in plan.devices]  # of several, each has an arena of its own
    problems = [lifetimes.device_problem(plan.problem, plan.graph, d) for d in devices] or [plan.problem]
    found = [solve(problem, time_limit=seconds) for problem in problems]
    least, size = sum(s.bound for s in found), sum(s.arena_size for s in found)
    state, how = ProofState.CLAIMED, f"solving again proves {format_exact(least)} within its limits"
    if least >= bound:
        state, how = ProofState.PROVEN, "by solving again, with the code that proves it first"
    elif size < bound:
        state, how = ProofState.FALSE, f"solving again finds an arena of {format_exact(size)}"
    return Proof(of="layout", state=state, bound=bound, how=how, independent=False)


def _races(plan: Plan) -> Proof:
    found = follow(plan)
    how = f"by vector clocks over {found.copies} copies"
    if found.races:
        how = f"{found.races[0].text}; {len(found.races)} such pairs in two steps"
    state = ProofState.FALSE if found.races else ProofState.PROVEN
    return Proof(of="races", state=state, bound=0, how=how, independent=False)
