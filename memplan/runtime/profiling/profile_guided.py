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
from memplan.evict.costs import cost_model
from memplan.evict.feedback import ProfileGuidedPolicy, RecordingPolicy, with_lateness
from memplan.evict.policies import fit_policy, policy_name
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.workload import Events, Policy
from memplan.runtime.debug.sanitizers import NO_SANITIZERS
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import Measured, RunOptions
from memplan.runtime.profiling.op_timer import Measurement, OpTimer
from memplan.trace import CapturedCall, device_costs, plan_traced
from memplan.trace.traced import TracedGraph

WARM = 1  # first steps of a plan that are not counted: they touch pages and fill caches
SAMPLES = 5  # steps that are counted; the median ignores two that were disturbed
REPLANS = 8  # the most new plans: each takes a search, a placement and a trial run; two are usually enough
WORTH = 0.01  # share of a step's time: shorter waits for reloads are not worth another plan

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
    traced, plan = options.settle(traced, retracer) if known is None else options.replan(known)
    assert plan.eviction is not None
    policy.settle(plan.eviction.sources, plan.graph.ops)
    return traced, plan, policy


class ProfileGuide:
    """Chooses the runners of a measured step.

    `build(plan)` makes a runner of a new plan. `measurements` are those of all plans so far, in order; `done`:
    measuring has ended.
    """

    def __init__(self, options: RunOptions, runner: Runner, policy: RecordingPolicy, build: Build) -> None:
        """Begin to measure a runner of `safe_plan`; all later plans keep the same budget."""
        self.measurements: list[Measurement] = []
        self.done = False
        self._options, self._traced, self._policy, self._build = options, runner.as_traced, policy, build
        self._leads: dict[tuple[int, int], float] = {}
        self._costs = cost_model(device_costs(runner.traced.device))
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
        self._log(f"-> {_id(plan)}", reason)
        self._watch(self._build(plan), events)
        return self.runner

    def _next(self, measured: Measurement) -> tuple[tuple[Plan, Events] | None, str]:
        """Return the next plan with its events, or None, and the reason."""
        eviction = measured.plan.eviction
        assert eviction is not None
        if len(self.measurements) > REPLANS:
            return None, f"planned anew {REPLANS} times"
        if len(self.measurements) == 1 and (found := self._planned((self._policy.policy,))):
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
        kept = self._options.keeping(self.runner.plan)
        measured = replace(kept, policy=policy, costs=self._costs, divide=None)
        redzone, room = self._options.redzone(self._traced.device), self.runner.arena.nbytes
        plan = plan_traced(self._traced, measured, redzone=redzone, room=room)
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
            self._log(f"-> {_id(measured.plan)}, which was faster", reason)
            self.runner = self._build(measured.plan)
        else:
            self._log("stays", reason)
        return self.runner

    def _watch(self, runner: Runner, events: Events) -> None:
        self.runner, self._events = runner, events
        self._op_timer = OpTimer(runner.program)
        runner.time(self._op_timer.sanitizers)
        runner.arena.copies.timed = True

    def _stop(self) -> None:
        self.done = True
        self.runner.time(NO_SANITIZERS)
        self.runner.arena.copies.timed = False

    def _log(self, what: str, reason: str) -> None:
        """Log the predicted and the measured times of the plan that has run, what comes next, and why."""
        measured = self.measurements[-1]
        plan, eviction = measured.plan, measured.plan.eviction
        assert eviction is not None
        _log.info(
            "%s: plan %s %s: %s; predicted %.3f ms a step (%.3f ms waiting) by costs '%s', measured %.3f ms (%.3f ms)",
            *(plan.model, _id(plan), what, reason, eviction.seconds * 1e3, eviction.stall * 1e3, eviction.costs),
            *(measured.seconds * 1e3, measured.stall * 1e3),
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
