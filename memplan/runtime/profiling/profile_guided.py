"""Profile-guided plans: the first steps run with a safe plan and are measured; later plans use the measured costs.

A `ProfileGuide` belongs to one runner. Between steps it reads the measurement and may replace the runner by another
one in the same arena. First the policy decides again, with measured costs. Then, while steps wait for reloads, reloads
start earlier (Capuchin's feedback), until none stalls, none can start earlier within the budget, or `REPLANS` is
reached. Then the fastest measured plan is kept, and measuring ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from memplan.core.plan import Plan
from memplan.errors import MemplanError, StaleActivationsError, UnsupportedCall
from memplan.evict.costs import CostModel, cost_model
from memplan.evict.feedback import ProfileGuidedPolicy, RecordingPolicy, with_lateness
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.select import fit_policy, policy_name
from memplan.evict.workload import Events, Policy
from memplan.runtime.debug.sanitizers import NO_SANITIZERS
from memplan.runtime.execute.runner import Runner
from memplan.runtime.measured_budget import Measured, replan
from memplan.runtime.options import RunOptions
from memplan.runtime.profiling.op_timer import Measurement, OpTimer
from memplan.trace import CapturedCall, device_costs, plan_traced
from memplan.trace.traced import TracedGraph

WARM = 1  # first steps of a plan that are not counted: they touch pages and fill caches
SAMPLES = 5  # steps that are counted; the median ignores two that were disturbed
REPLANS = 8  # the most new plans: each takes a search, a placement and a trial run; two are usually enough
WORTH = 0.01  # share of a step's time: shorter waits for reloads are not worth another plan
OFF = 0.25  # share of the predicted time: if the measured time differs by more, the policy decides again,
ASKED = 2  # times at most, because that takes the longest

PlanWith = Callable[[Policy, CostModel], Plan]
Build = Callable[[Plan], Runner]
_log = logging.getLogger("memplan")


def recording_policy(policy: str | Policy) -> RecordingPolicy:
    """Return the policy wrapped so that it remembers its decision."""
    decide = fit_policy(policy)

    def quick(workload: Any) -> Events:
        return decide(workload, quick=True)  # type: ignore[call-arg]

    return RecordingPolicy(decide, policy_name(policy), quick if decide in (auto, recompute) else None)


def arena_room(plan: Plan, policy: RecordingPolicy | None) -> int:
    """Return the bytes of an arena in which every plan within the budget fits; 0 if nothing is evicted."""
    measured = policy is not None and policy.events is not None
    return max(plan.arena_limit or 0, 0) if measured and not plan.devices else 0


def safe_plan(
    options: RunOptions,
    traced: TracedGraph,
    retracer: CapturedCall | None,
    *,
    known: Measured | None = None,
) -> tuple[TracedGraph, Plan, RecordingPolicy]:
    """Return the planned variant of the step, its plan, and the policy that decided it.

    The plan keeps the budget by the default costs of the device. `known`: a variant that was tried, to be planned anew
    with what its kernels were seen to allocate.
    """
    if len(traced.runs_on) > 1:
        what = f"measures one device, the step runs on {', '.join(traced.runs_on)}"
        raise UnsupportedCall(
            what, where="costs='measure'", hint="pass costs of your own, or one device", see="measure"
        )
    options = replace(options, costs=None)
    if options.divide and known is None:  # the division is chosen first; the policy then decides about the divided step
        traced, plan = options.settle(traced, retracer)
        assert plan.eviction is not None
        options, retracer = replace(options.keeping(plan), divide=None), None
    policy = recording_policy(options.policy)
    options = replace(options, policy=policy)
    traced, plan = options.settle(traced, retracer) if known is None else replan(options, known)
    assert plan.eviction is not None
    policy.settle(plan.eviction.sources, plan.graph.ops)
    return traced, plan, policy


def guide_of(
    options: RunOptions, traced: TracedGraph, runner: Runner, policy: RecordingPolicy, build: Build
) -> ProfileGuide:
    """Return the guide of a runner of `safe_plan`; all its plans keep the same budget."""
    eviction = runner.plan.eviction
    assert eviction is not None

    def plan_with(policy: Policy, costs: CostModel) -> Plan:
        measured = replace(options.keeping(runner.plan), policy=policy, costs=costs, divide=None)
        return plan_traced(traced, measured, redzone=options.redzone(traced.device), room=runner.arena.nbytes)

    return ProfileGuide(runner, policy, plan_with, build)


class ProfileGuide:
    """Chooses the runners of a measured step.

    `plan_with(policy, costs)` makes a new plan within the budget, and `build(plan)` makes a runner. `measurements` are
    those of all plans so far, in order; `done`: measuring has ended.
    """

    def __init__(self, runner: Runner, policy: RecordingPolicy, plan_with: PlanWith, build: Build) -> None:
        self.measurements: list[Measurement] = []
        self.done = False
        self._policy, self._plan_with, self._build = policy, plan_with, build
        self._leads: dict[tuple[int, int], float] = {}
        self._costs = cost_model(device_costs(runner.traced.device))
        self._asked = 0
        self._stall = 0.0
        assert policy.events is not None
        self._watch(runner, policy.events)

    @property
    def ready(self) -> bool:
        """Whether enough steps were measured, and nothing is in flight."""
        return (
            not self.done and self._op_timer.samples >= WARM + SAMPLES and self.runner.arena.ownership.pending is None
        )

    def next_runner(self) -> Runner:
        """Return the runner of the next steps: the same one, or one with a new plan. Call it only if `ready`.

        After a `MemplanError`, it logs a warning, keeps the current plan and ends measuring.
        """
        self.runner.current()  # raises to the caller if the model is not as it was traced
        try:
            with torch.inference_mode(False):
                return self._choose_runner()
        except StaleActivationsError:  # another thread is in the arena
            raise
        except MemplanError as error:
            _log.warning("%s: the plan stays as it is: %s", self.runner.plan.model, error)
            self._stop()
            return self.runner
        except BaseException:
            self._stop()
            raise

    # -- the next plan -----------------------------------------------------------------------------------

    def _choose_runner(self) -> Runner:
        with self.runner.arena.ownership:
            measured = self._op_timer.measurement(self._costs, self.runner.arena, skip=WARM)
        self.measurements.append(measured)
        self._costs = measured.costs
        found, reason = self._next(measured)
        if found is None:
            return self._settle(reason)
        plan, events = found
        self._log(measured, plan, reason)
        self._watch(self._build(plan), events)
        return self.runner

    def _next(self, measured: Measurement) -> tuple[tuple[Plan, Events] | None, str]:
        """Return the next plan with its events, or None, and the reason."""
        eviction = measured.plan.eviction
        assert eviction is not None
        if len(self.measurements) > REPLANS:
            return None, f"planned anew {REPLANS} times"
        off = abs(measured.seconds - eviction.seconds) > OFF * eviction.seconds
        if not self._asked or (off and self._asked < ASKED):
            self._asked += 1
            if found := self._planned((self._policy.policy,)):
                return found, "the costs were measured"
        late = {(copy.storage, copy.nth): copy.stall for copy in measured.late}
        stall, before, self._stall = sum(late.values()), self._stall, sum(late.values())
        if stall <= WORTH * measured.seconds:
            return None, "no reload stalls"
        if self._leads and stall >= before:
            return None, "starting earlier does not help"
        self._leads = with_lateness(self._leads, late)
        found = self._planned(())
        return found, f"{len(late)} reloads stalled" if found else "no room for reloads to start earlier"

    def _planned(self, policies: tuple[Policy, ...]) -> tuple[Plan, Events] | None:
        """Return a plan with the events that the profile-guided policy decides; None if they are the current ones."""
        policy = RecordingPolicy(ProfileGuidedPolicy(self._events, self._leads, policies), self._policy.__name__)
        plan = self._plan_with(policy, self._costs)
        assert plan.eviction is not None
        policy.settle(plan.eviction.sources, plan.graph.ops)
        if policy.events is None or policy.events == self._events:
            return None
        return plan, policy.events

    def _settle(self, reason: str) -> Runner:
        """End measuring, and return a runner of the fastest plan so far."""
        best = min(range(len(self.measurements)), key=lambda i: self.measurements[i].seconds)
        measured, now = self.measurements[best], self.measurements[-1]
        self._stop()
        if measured.plan.fingerprint != now.plan.fingerprint and measured.seconds < (1 - WORTH) * now.seconds:
            what = "%s: plan %s -> %s, which was faster: %s; %s; the other %s"
            _log.info(
                what, now.plan.model, _id(now.plan), _id(measured.plan), reason, _figures(now), _figures(measured)
            )
            self.runner = self._build(measured.plan)
        else:
            _log.info("%s: plan %s stays: %s; %s", now.plan.model, _id(now.plan), reason, _figures(now))
        return self.runner

    def _watch(self, runner: Runner, events: Events) -> None:
        self.runner, self._events = runner, events
        self._op_timer = OpTimer(runner.program)
        runner.time(self._op_timer.sanitizers)
        runner.arena.copies.time(True)

    def _stop(self) -> None:
        self.done = True
        self.runner.time(NO_SANITIZERS)
        self.runner.arena.copies.time(False)

    def _log(self, measured: Measurement, plan: Plan, reason: str) -> None:
        assert plan.eviction is not None
        _log.info(
            "%s: plan %s -> %s: %s; %s; the new plan is predicted to take %.3f ms, %.3f ms of them waiting",
            *(plan.model, _id(measured.plan), _id(plan), reason, _figures(measured)),
            *(plan.eviction.seconds * 1e3, plan.eviction.stall * 1e3),
        )


class MeasuredStep:
    """A module or step that can be compiled with `costs="measure"`, with its measurements."""

    _measurements: Sequence[Measurement]

    def _taken(self) -> Sequence[Measurement]:
        return self._measurements

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The measurements of all plans so far, in the order in which they ran (with `costs="measure"`).

        For a whole step, they are those of the program that updates the parameters.
        """
        return tuple(self._taken())

    @property
    def measurement(self) -> Measurement | None:
        """The latest of `measurements`; None before the first one."""
        taken = self._taken()
        return taken[-1] if taken else None


def _id(plan: Plan) -> str:
    return plan.fingerprint[:12]


def _figures(measured: Measurement) -> str:
    """Return the predicted and the measured times of a plan as text, with the name of the costs."""
    eviction = measured.plan.eviction
    assert eviction is not None
    return (
        f"predicted {eviction.seconds * 1e3:.3f} ms a step ({eviction.stall * 1e3:.3f} ms waiting) by costs"
        f" '{eviction.costs}', measured {measured.seconds * 1e3:.3f} ms ({measured.stall * 1e3:.3f} ms waiting)"
    )
