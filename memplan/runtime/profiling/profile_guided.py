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

import torch

from memplan.core.plan import Plan
from memplan.errors import MemplanError, StaleActivationsError
from memplan.evict.costs import cost_model
from memplan.evict.feedback import started_earlier, with_lateness
from memplan.evict.policies import fit_policy
from memplan.evict.workload import Policy
from memplan.runtime.debug.sanitizers import NO_SANITIZERS
from memplan.runtime.execute.runner import Runner
from memplan.runtime.options import RunOptions
from memplan.runtime.profiling.op_timer import Measurement, OpTimer
from memplan.trace import device_costs, plan_traced

WARM = 1  # first steps of a plan that are not counted: they touch pages and fill caches
SAMPLES = 5  # steps that are counted; the median ignores two that were disturbed
REPLANS = 8  # the most new plans: each takes a search, a placement and a trial run; two are usually enough
WORTH = 0.01  # share of a step's time: shorter waits for reloads are not worth another plan

Build = Callable[[Plan], Runner]
_log = logging.getLogger("memplan")


class ProfileGuide:
    """Chooses the runners of a measured step.

    `build(plan)` makes a runner of a new plan. `measurements` are those of all plans so far, in order; `done`:
    measuring has ended.
    """

    def __init__(self, options: RunOptions, runner: Runner, build: Build) -> None:
        """Begin to measure a runner; all later plans keep the same budget."""
        self.measurements: list[Measurement] = []
        self.done = False
        self._options, self._traced, self._build = options, runner.as_traced, build
        self._policy = fit_policy(options.policy)
        self._leads: dict[tuple[int, int], float] = {}
        self._stall = 0.0
        self._watch(runner)

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
            base = self.measurements[-1].costs if self.measurements else cost_model(device_costs(self._traced.device))
            measured = self._op_timer.measurement(base, self.runner.arena, skip=WARM)
        self.measurements.append(measured)
        found, reason = self._next(measured)
        if found is None:
            return self._settle(reason)
        self._log(f"-> {_id(found)}", reason)
        self._watch(self._build(found))
        return self.runner

    def _next(self, measured: Measurement) -> tuple[Plan | None, str]:
        """Return the next plan, or None, and the reason."""
        if len(self.measurements) > REPLANS:
            return None, f"planned anew {REPLANS} times"
        if len(self.measurements) == 1 and (found := self._planned(self._policy)):
            return found, "the costs were measured"
        late = {(copy.storage, copy.nth): copy.stall for copy in measured.late}
        stall, before, self._stall = sum(late.values()), self._stall, sum(late.values())
        if stall <= WORTH * measured.seconds:
            return None, "no reload stalls"
        if self._leads and stall >= before:
            return None, "starting earlier does not help"
        self._leads = with_lateness(self._leads, late)
        found = self._planned(started_earlier(self._policy, self._leads))
        return found, f"{len(late)} reloads stalled" if found else "no room for reloads to start earlier"

    def _planned(self, policy: Policy) -> Plan | None:
        """Return the plan of a policy with the costs of the first measurement; None if it is the current one."""
        now = self.runner.plan
        options = replace(self._options.keeping(now), policy=policy, costs=self.measurements[0].costs, divide=None)
        redzone, room = self._options.redzone(self._traced.device), self.runner.arena.nbytes
        plan = plan_traced(self._traced, options, redzone=redzone, room=room)
        return None if _steps(plan) == _steps(now) else plan

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

    def _watch(self, runner: Runner) -> None:
        self.runner = runner
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


def _steps(plan: Plan) -> list[str]:
    """Return the names of the ops of a plan, copies and recomputed ones included, in the order in which they run."""
    return [plan.graph.ops[i].name for i in plan.schedule.order]


def _id(plan: Plan) -> str:
    return plan.fingerprint[:12]
