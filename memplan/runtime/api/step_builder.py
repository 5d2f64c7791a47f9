"""Builds the programs of a whole step from a model, its loss and an optimizer, all in one arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.totals import functional_transient
from memplan.evict.feedback import RecordingPolicy
from memplan.runtime.api.builder import require_real
from memplan.runtime.execute.cuda_graphs import make_recorder
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.ranks import require_collective
from memplan.runtime.measured_budget import Built, Measured, adopt_need, build_measured, replan
from memplan.runtime.memory.arena import Arena, arena_for_all
from memplan.runtime.memory.host import prepare_host
from memplan.runtime.options import StepOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide, arena_room, guide_of, safe_plan
from memplan.trace import CapturedStep, capture_step
from memplan.trace.optimizer.updates import Accumulate
from memplan.trace.traced import TracedGraph


class StepBuilder:
    """Builds the programs of a `CompiledStep`; `loss` is the model with its loss."""

    def __init__(self, loss: nn.Module, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        self._loss, self._optimizer, self._options = loss, optimizer, options

    def build(
        self, batch: tuple[Any, ...], kwargs: dict[str, Any], kinds: Sequence[Accumulate | None], given: Plan | None
    ) -> tuple[StepGuards, list[Runner], list[ProfileGuide]]:
        """Return the module_guards that the programs act on, a program for each of `kinds`, and the guides.

        Each program has the `given` plan or a new one. There are guides only if steps are measured and something is
        evicted.
        """
        require_real(self._loss, batch, kwargs)
        options = self._options
        captured = [self._capture(batch, kwargs, kind) for kind in kinds]
        captured[0].warn()
        traced = [c.retrace() for c in captured]
        if not options.allow_unsynchronized:
            require_collective(traced)
        prepare_host(self._loss, traced[0], self._optimizer)
        device = traced[0].device
        recorder = make_recorder(device, options.sanitize) if options.cuda_graph else None
        module_guards = StepGuards(self._loss, self._optimizer)
        steps = list(zip(traced, captured, strict=True))
        planned: list[tuple[TracedGraph, Plan, RecordingPolicy | None]] = []

        def runner_of(arena: Arena, t: TracedGraph, plan: Plan) -> Runner:
            view = arena.view_for(plan) or arena
            return Runner(module_guards, t, plan, view, sanitize=options.sanitize, recorder=recorder, whole=True)

        def build(known: Sequence[Measured | None]) -> Sequence[Built]:
            """Return the programs, planned with what is measured of each, in a new arena."""
            planned[:] = [self._planned(step, given, one) for step, one in zip(steps, known, strict=True)]
            if given is None:
                planned[:] = self._in_one_arena(planned, known)
            wanted = max(arena_room(plan, policy) for _, plan, policy in planned)
            room = min([wanted, *_limits_of_totals([plan for _, plan, _ in planned])])
            arena = arena_for_all([plan for _, plan, _ in planned], device, room)
            made = [Built(traced=t, runner=runner_of(arena, t, plan)) for t, plan, _ in planned]
            if options.budget == "min":
                for one in made:
                    adopt_need(one.runner)
            return made

        made = build_measured(build, len(steps), again=given is None)
        runners = [one.runner for one in made]
        guides = [
            guide_of(options, t, runner, policy, partial(runner_of, runner.arena, t))
            for (t, _, policy), runner in zip(planned, runners, strict=True)
            if policy is not None and policy.events is not None
        ]
        return module_guards, runners, guides

    def _planned(
        self, step: tuple[TracedGraph, CapturedStep | None], given: Plan | None, known: Measured | None
    ) -> tuple[TracedGraph, Plan, RecordingPolicy | None]:
        """Return the variant of a step that is planned, its plan, and the policy to measure if steps are measured."""
        options = self._options
        if options.measures:
            return safe_plan(options, *step, known=known)
        return *(options.settle(*step, given) if known is None else replan(options, known)), None

    def _in_one_arena(
        self, planned: Sequence[tuple[TracedGraph, Plan, RecordingPolicy | None]], known: Sequence[Measured | None]
    ) -> list[tuple[TracedGraph, Plan, RecordingPolicy | None]]:
        """Return the plans, each with an arena that leaves every other program the room that its budget needs."""
        limits = _limits_of_totals([plan for _, plan, _ in planned])
        found = []
        for (traced, plan, policy), one in zip(planned, known, strict=True):
            if plan.eviction is not None and limits and plan.arena_size > min(limits):
                tried = replace(plan, eviction=replace(plan.eviction, arena_budget=min(limits)))
                transient = functional_transient(traced.graph) if one is None else one.transient
                step = Measured(traced=traced, plan=tried, transient=transient)
                traced, plan, policy = self._planned((traced, None), None, step)  # noqa: PLW2901
            found.append((traced, plan, policy))
        return found

    def _capture(self, batch: tuple[Any, ...], kwargs: dict[str, Any], kind: Accumulate | None) -> CapturedStep:
        return capture_step(
            self._loss,
            self._optimizer,
            batch,
            kwargs,
            clip_grad_norm=self._options.clip_grad_norm,
            accumulate=kind,
            rates_in_memory=self._options.cuda_graph,
            in_place=self._options.in_place,
            device=self._options.device,
        )


def _limits_of_totals(plans: Sequence[Plan]) -> list[int]:
    """Return the most bytes that the arena of each plan with a budget of its total may have, on one device."""
    limited = [plan for plan in plans if plan.eviction is not None and plan.eviction.budget is not None]
    return [plan.arena_limit for plan in limited if plan.arena_limit is not None and not plan.devices]
