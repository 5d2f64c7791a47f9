"""Repeats the proof of each claim of a plan, and reports how it ended.

A proof runs for a limited time in a process of its own, because compiled searches cannot be interrupted.
"""

from __future__ import annotations

import enum
import multiprocessing
import signal
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.happens_before import follow, has_copies
from memplan.core.plan import Plan
from memplan.core.schedule import Evidence, Schedule
from memplan.core.units import format_exact
from memplan.errors import MemplanError
from memplan.schedule import order
from memplan.schedule.select import POLICIES
from memplan.solvers import solve
from memplan.verify.cut import between_phases, least_at

T = TypeVar("T")

_SEARCHES = ("exact", "beam")
_UNLIMITED = 10**15  # a work limit that is never reached before the time limit


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

    Cuts are found by networkx. The result of a search is proven by repeating that search, for at most `time_limit`
    seconds each (None: within the search's own limits, which count work).
    """
    return _order(plan, time_limit), _layout(plan, time_limit), *((_races(plan),) if has_copies(plan) else ())


def _order(plan: Plan, seconds: float | None) -> Proof:
    graph, schedule = plan.graph, plan.schedule
    if schedule.evidence in (Evidence.SEARCH, Evidence.LONG_SEARCH):
        return _searched(graph, schedule, seconds)
    if schedule.evidence is Evidence.BETWEEN:
        return _by_cut(schedule, between_phases(graph), "what is alive between forward and backward", "a sum")
    if not graph.ops:
        return _by_cut(schedule, 0, "no op", "a sum")
    op = next(index for index, op in enumerate(graph.ops) if op.name == schedule.proof)
    least, how = _asked(seconds, f"networkx's minimum_cut at {schedule.proof}", least_at, graph, op)
    if least is None:
        return Proof(of="order", state=ProofState.CLAIMED, bound=schedule.bound, how=how, independent=True)
    return _by_cut(schedule, least, f"the minimum cut at {schedule.proof}", "networkx's minimum_cut")


def _asked(seconds: float | None, what: str, function: Callable[..., T], *args: Any) -> tuple[T | None, str]:
    """Return the result of a proof, or None and why there is none, which says nothing of the claim."""
    try:
        return within(seconds, function, *args), f"{what} did not end within {seconds or 0:g} s"
    except MemplanError as error:
        return None, f"{what} gave no answer: {error.what}"


def _by_cut(schedule: Schedule, least: int, what: str, by: str) -> Proof:
    """Return the proof of the bound by the least bytes at one point, which were found independently."""
    how = f"by {what}: {format_exact(least)}, by {by}, independent of what proved it first"
    state = ProofState.PROVEN if least >= schedule.bound else ProofState.FALSE
    return Proof(of="order", state=state, bound=schedule.bound, how=how, independent=True)


def _searched(graph: Graph, schedule: Schedule, seconds: float | None) -> Proof:
    """Return the proof of the bound by repeating the search that is said to have proven it."""
    first = schedule.policy.split(" + ", maxsplit=1)[0]  # of the policy's name: the long search that it begins with
    name = "auto" if schedule.evidence is Evidence.SEARCH else first if first in _SEARCHES else "exact"
    called = "the portfolio's search" if name == "auto" else f"the long search {name!r}"
    state = ProofState.CLAIMED
    found, how = _asked(seconds, called, _repeat_search, graph, name, seconds is not None)
    if found is not None and found.bound >= schedule.bound:
        state, how = ProofState.PROVEN, f"by repeating {called}, the code that proves it first"
    elif found is not None and found.max_live < schedule.bound:
        state, how = ProofState.FALSE, f"{called} finds an order that needs {format_exact(found.max_live)}"
    elif found is not None:
        how = f"{called} reached its limits and proves {format_exact(found.bound)}"
    return Proof(of="order", state=state, bound=schedule.bound, how=how, independent=False)


def _repeat_search(graph: Graph, name: str, unlimited: bool) -> Schedule:
    """Return the schedule and the bound that a policy finds; if `unlimited`, the caller stops a long search."""
    if not unlimited or name == "auto":
        return order(graph, name)
    module, function = POLICIES[name]
    found: Schedule = getattr(import_module(f"memplan.schedule.{module}"), function)(graph, work=_UNLIMITED)
    return found


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
    if found.idle_waits:  # kept, because the error of a copy is raised where the step waits for it
        how += f"; {len(found.idle_waits)} of their waits only report errors, others order the same"
    if found.races:
        how = f"{found.races[0].text}; {len(found.races)} such pairs in two steps"
    state = ProofState.FALSE if found.races else ProofState.PROVEN
    return Proof(of="races", state=state, bound=0, how=how, independent=False)


def within(seconds: float | None, function: Callable[..., T], *args: Any) -> T | None:
    """Return the result of `function(*args)`, or None when it takes longer than `seconds`.

    `seconds` is wall time, the start of the process included; None means no limit and no other process. Raises what
    the function raises, and `MemplanError` when its process ends without a result.
    """
    if seconds is None:
        return function(*args)
    context = multiprocessing.get_context("spawn")  # fork is not safe beside the threads of numerical libraries
    answers, sender = context.Pipe(duplex=False)
    child = context.Process(target=_answer, args=(sender, function, args), daemon=True)
    child.start()
    sender.close()
    try:
        if not answers.poll(seconds):
            return None
        returned, answer = answers.recv()
    except EOFError:
        child.join()
        what = f"the process that proves again ended with exit code {child.exitcode}"
        raise MemplanError(what, hint="it may have run out of memory: try without --time-limit") from None
    finally:
        child.kill()
        child.join()
        child.close()
        answers.close()
    if not returned:
        raise answer
    found: T = answer
    return found


def _answer(sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt ends the parent, and the parent this process
    try:
        sender.send((True, function(*args)))
    except Exception as error:
        sender.send((False, error))
