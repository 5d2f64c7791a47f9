"""Builds the programs of a whole step from a model, its loss and an optimizer, all in one arena."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.core.totals import functional_transient
from memplan.core.units import format_bytes
from memplan.distributed.parallelism import parallelism_of
from memplan.distributed.step_ranks import StepRanks, batch_lines, option_lines, require_options
from memplan.errors import UnsupportedCall
from memplan.evict.feedback import RecordingPolicy
from memplan.runtime.api.builder import prepare_host, require_real
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.recorders import make_recorder
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import InputGuards
from memplan.runtime.guards.ranks import require_collective
from memplan.runtime.measured_budget import (
    Built,
    Measured,
    adopt_need,
    build_measured,
    discard,
    replan,
    smaller_plan,
)
from memplan.runtime.memory.arena import Arena, NewArenas, arena_for_all
from memplan.runtime.memory.idle_arenas import give_back
from memplan.runtime.options import StepOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide, arena_room, guide_of, safe_plan
from memplan.trace import CapturedCall, capture_loss
from memplan.trace.default_kernels import made_by_default
from memplan.trace.optimizer.optimizers import is_fused
from memplan.trace.optimizer.updates import COUNTERS, Accumulate
from memplan.trace.traced import Source, TracedGraph


@dataclass(slots=True)
class Assembled:
    """A program with the trace that it was assembled from, so that it can be assembled again in a larger arena.

    `counted`: the parameters whose step counters it has in one tensor.
    """

    traced: TracedGraph
    runner: Runner
    counted: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        self.counted = next((b.names for b in self.traced.bound(Source.STATE) if b.key == COUNTERS), ())


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The programs for calls of one kind: batches of one layout, in one state of the model.

    `modes` and `update_key`: the training flags of all submodules, and what `StepGuards.update_key` was. `adding`: the
    program of calls that only add to the sums of gradients, if there are any. `updating`: that of the others.
    """

    modes: list[bool]
    update_key: Any
    adding: Assembled | None
    updating: Assembled

    @property
    def programs(self) -> list[Assembled]:
        """Its programs."""
        return [self.updating] if self.adding is None else [self.adding, self.updating]


_log = logging.getLogger("memplan")
_Planned = tuple[TracedGraph, Plan, RecordingPolicy | None]


@dataclass(slots=True, kw_only=True)
class _Made:
    """New programs, and the guides that measure them."""

    programs: list[Assembled]
    guides: list[ProfileGuide]


class StepBuilder:
    """Builds the programs of a `CompiledStep`; `loss` is the model with its loss.

    All programs share one arena. One that needs more gets a larger arena, in which the others are made `again` when
    they run. `plans` are those that were built; `guides` measure their programs, if steps are measured and something is
    evicted. `hooks` observe them.
    """

    def __init__(self, loss: nn.Module, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        self._loss, self._optimizer, self.options = loss, optimizer, options
        self.plans: list[StepPlan] = []
        self.guides: list[ProfileGuide] = []
        self.hooks = Hooks()
        self._arena: Arena | None = None
        self._new_arenas = NewArenas()
        self._recorder: Any = None
        self.guards: StepGuards
        self.parallelism = parallelism_of(loss)
        self.ranks = StepRanks(None if self.parallelism is None else self.parallelism.group)
        if self.parallelism is not None:
            require_options(options, replicated=self.parallelism.replicas is not None)

    @property
    def plans_update(self) -> bool:
        """Whether updates are part of programs; otherwise the optimizer's own `step()` runs after the backward."""
        # The norm of all gradients takes the parts of all ranks: torch's own clipping and step() know that.
        divided = self.parallelism is not None and self.parallelism.divides
        return is_fused(self._optimizer) and not (divided and self.options.clip_grad_norm is not None)

    def agreed_lines(self, batch: Any, made: StepPlan, given: Plan | None) -> list[str]:
        """Return what all ranks must have alike of the first plan, in the order in which differences are named."""
        programs = [one.runner.plan for one in made.programs]
        found = [f"{key} {version}" for key, version in sorted(programs[0].versions.items())]
        found += [*option_lines(self.options), f"plan {'new' if given is None else 'given'}"]
        found += batch_lines(batch) if self.options.has_budget else []
        found += [] if self.parallelism is None else self.parallelism.lines
        return found + [f"program {i}: {line}" for i, plan in enumerate(programs) for line in _collectives(plan)]

    def build(self, batch: tuple[Any, ...], kwargs: dict[str, Any], given: Plan | None = None) -> StepPlan:
        """Return the plan of calls like this one; the program that updates has the `given` plan or a new one."""
        _require_no_gradients((batch, kwargs))
        require_real(self._loss, batch, kwargs)
        first = not self.plans
        adding = self.options.accumulate > 1

        def make(options: StepOptions) -> _Made:
            """Return the programs, traced, planned and tried."""
            self.options = options
            how, where = options.kernels, options.device
            loss = capture_loss(self._loss, self._optimizer, batch, kwargs, device=where, kernels=how)
            steps = [
                loss.step(
                    kind,
                    clip_grad_norm=options.clip_grad_norm,
                    rates_in_memory=options.cuda_graph,
                    in_place=options.in_place,
                )
                for kind in ((Accumulate.ADD, Accumulate.UPDATE) if adding else (None,))
            ]
            traced = [step.first() for step in steps]
            if first:
                steps[0].warn()
                self.guards = StepGuards(self._loss, self._optimizer)
            self.guards.look_again()
            return self._assemble(list(zip(traced, steps, strict=True)), given)

        self.options, made = made_by_default(self.options, type(self._loss).__name__, make)
        plan = StepPlan(
            modes=self.guards.modes(),
            update_key=self.guards.update_key,
            adding=made.programs[0] if adding else None,
            updating=made.programs[-1],
        )
        self.plans.append(plan)
        self.guides += made.guides
        return plan

    def begin(self, agreement: str, plan: StepPlan) -> None:
        """Store that all ranks run the programs of a plan, by an agreement of that name."""
        self.ranks.begin(agreement, [_collectives(one.runner.plan) for one in plan.programs])

    def agree(self, plan: StepPlan, one: Assembled) -> None:
        """Let the ranks agree on a program of a plan, unless the last call was of the same collectives."""
        known = [_collectives(p.runner.plan) for p in plan.programs]
        found = _collectives(one.runner.plan)
        self.ranks.agree(found, known if found in known else [*known, found])

    def _assemble(self, steps: Sequence[tuple[TracedGraph, CapturedCall]], given: Plan | None) -> _Made:
        """Return a program for each step, in the arena or in a larger one that replaces it."""
        options, traced = self.options, [t for t, _ in steps]
        if not options.allow_unsynchronized:
            require_collective([t.graph for t in traced])
        prepare_host(self._loss, traced[0], self._optimizer)
        device = traced[0].device
        if options.cuda_graph and self._recorder is None:
            self._recorder = make_recorder(device, options.sanitize)
        planned: list[_Planned] = []

        def build(known: Sequence[Measured | None]) -> Sequence[Built]:
            """Return the programs, planned with what is measured of each, in an arena in which all programs fit."""
            self._new_arenas.release()  # of the programs that were tried before
            planned[:] = [self._planned(step, given, one) for step, one in zip(steps, known, strict=True)]
            if given is None:
                planned[:] = self._in_one_arena(planned, known)
            return self._placed(planned, device)

        first = not self.plans
        compared = given is None and first and (len(steps) == 1 or not options.has_budget)
        with self._new_arenas:
            made = build_measured(build, len(steps), again=given is None, alone=first)
            if compared and all(len(t.runs_on) < 2 for t in traced):
                smaller = [smaller_plan(options, one) for one in made]
                if any(smaller):
                    discard(made)
                    del made
                    planned[:] = [
                        (*found, policy) if found is not None else (t, plan, policy)
                        for found, (t, plan, policy) in zip(smaller, planned, strict=True)
                    ]
                    made = self._placed(planned, device)
        guides = [
            guide_of(options, one.traced, one.runner, policy, partial(self._runner, one.runner.arena, one.traced))
            for (_, _, policy), one in zip(planned, made, strict=True)
            if policy is not None and policy.events is not None
        ]
        return _Made(programs=[_kept(one.traced, one.runner) for one in made], guides=guides)

    def _placed(self, planned: Sequence[_Planned], device: torch.device) -> list[Built]:
        """Return the programs of some plans, in the arena or in a larger one that has room for all programs."""
        plans = [plan for _, plan, _ in planned]
        others = [one.runner.plan for one in self._programs]
        arena = self._arena
        if arena is None or arena.ownership.released or not all(arena.view_for(plan) for plan in plans):
            self._free_arena()
            wanted = max(arena_room(plan, policy) for _, plan, policy in planned)
            room = min([wanted, *_limits_of_totals(plans)])
            arena = self._arena = self._new_arenas.keep(arena_for_all([*plans, *others], device, room))
            if others:
                _log.info("%s: the arena grows to %s", type(self._loss).__name__, format_bytes(arena.nbytes))
        made = []
        for found, plan, _ in planned:
            made.append(Built(traced=found, runner=self._runner(arena, found, plan)))
        if self.options.budget == "min":
            for one in made:
                adopt_need(one.runner)
        return made

    def _runner(
        self, arena: Arena, traced: TracedGraph, plan: Plan, bound: Any = None, input_guards: InputGuards | None = None
    ) -> Runner:
        return Runner(
            self.guards,
            traced,
            plan,
            arena.view_for(plan) or arena,
            sanitize=self.options.sanitize,
            recorder=self._recorder,
            whole=True,
            hooks=self.hooks,
            bound=bound,
            input_guards=input_guards,
        )

    def again(self, one: Assembled) -> None:
        """Make a program, whose arena was freed, in the one that replaced it. Raises `InputMismatch` as `Runner`."""
        of = one.runner
        if self._arena is None or self._arena.ownership.released:  # what was to replace it could not be made
            self._arena = arena_for_all([p.runner.plan for p in self._programs], one.traced.device)
        self.guides = [g for g in self.guides if g.runner is not of]
        one.runner = self._runner(self._arena, one.traced, of.plan, of.program.bound, of.input_guards)
        one.runner.forget_example()  # no other plan is tried on it

    def give_back_arena(self) -> None:
        """Give the arena back until a step runs in it, because one runs without a plan now."""
        if self._arena is not None:
            give_back(self._arena)

    def _free_arena(self) -> None:
        """Free the arena before a larger one replaces it, so that there is one at a time."""
        if self._arena is not None and not self._arena.ownership.released:
            with self._arena.ownership as ownership:
                ownership.require_free("a program that needs a larger arena")
                self._arena.release()

    def _planned(
        self, step: tuple[TracedGraph, CapturedCall | None], given: Plan | None, known: Measured | None
    ) -> _Planned:
        """Return the variant of a step that is planned, its plan, and the policy to measure if steps are measured."""
        options, room = self.options, self._room
        if options.measures:
            return safe_plan(options, *step, known=known)
        if known is not None:
            return *replan(options, known, room=room), None
        return *options.settle(*step, given, room=room), None

    @property
    def _programs(self) -> list[Assembled]:
        return [one for plan in self.plans for one in plan.programs]

    @property
    def _room(self) -> int:
        """The bytes that the arena has in any case; it may have been freed, for one with room for more."""
        if self._arena is None or not self._arena.ownership.released:
            return 0 if self._arena is None else self._arena.nbytes
        return max((one.runner.plan.arena_size for one in self._programs), default=0)

    def _in_one_arena(self, planned: Sequence[_Planned], known: Sequence[Measured | None]) -> list[_Planned]:
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


def _kept(traced: TracedGraph, runner: Runner) -> Assembled:
    """Return a program that was tried, and from now on keeps no tensors of the batch that it was tried on."""
    runner.forget_example()
    return Assembled(traced.without_data(), runner)


def _collectives(plan: Plan) -> tuple[str, ...]:
    """Return the collectives of a plan, a line each."""
    return tuple(c.line for c in plan.collectives)


def _require_no_gradients(batch: Any) -> None:
    """Raise `UnsupportedCall` for an input that requires a gradient: a compiled step computes none for inputs."""
    for i, leaf in enumerate(pytree.tree_leaves(batch)):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            what = "requires a gradient, which a compiled step does not compute"
            hint = "pass it detached; make what computes it a part of the model, or use memplan.compile"
            raise UnsupportedCall(what, where=f"input {i} of the example batch", hint=hint, see="batch-gradient")


def _limits_of_totals(plans: Sequence[Plan]) -> list[int]:
    """Return the most bytes that the arena of each plan with a budget of its total may have, on one device."""
    limited = [plan for plan in plans if plan.eviction is not None and plan.eviction.budget is not None]
    return [plan.arena_limit for plan in limited if plan.arena_limit is not None and not plan.devices]
