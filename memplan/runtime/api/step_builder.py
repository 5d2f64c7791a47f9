"""Builds the programs of a whole step from a model, its loss and an optimizer, all in one arena."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.distributed.parallelism import parallelism_of
from memplan.distributed.step_ranks import StepRanks, batch_lines, option_lines, require_options
from memplan.errors import UnsupportedCall
from memplan.runtime.builder import ProgramBuilder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.optimizer_state import StepGuards
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import require_real
from memplan.runtime.guards.refused_calls import require_collective
from memplan.runtime.memory.idle_arenas import give_back
from memplan.runtime.options import StepOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide
from memplan.runtime.programs import Programs
from memplan.trace import capture_loss
from memplan.trace.optimizer.optimizers import is_fused
from memplan.trace.traced import named_leaves
from memplan.trace.variants import first_variant


@dataclass(slots=True, kw_only=True)
class StepPlan:
    """The program for calls of one kind: batches of one layout, in one state of the model.

    `modes` and `update_key`: the training flags of all submodules, and what `StepGuards.update_key` was.
    """

    modes: list[bool]
    update_key: Any
    program: Runner


class StepBuilder(ProgramBuilder[StepOptions]):
    """Builds the programs of a `CompiledStep`; `loss` is the model with its loss.

    All programs share one arena, which grows if one needs more. `plans`: those of each kind of call; `guides` measure
    their programs, if steps are measured and something is evicted. `hooks` observe them.
    """

    guards: StepGuards

    def __init__(self, loss: nn.Module, optimizer: torch.optim.Optimizer, options: StepOptions) -> None:
        super().__init__(options, type(loss).__name__, Hooks(), whole=True)
        self._loss, self._optimizer = loss, optimizer
        self.plans: Programs[StepPlan] = Programs()
        self.guides: list[ProfileGuide] = []
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
        found = [f"{key} {version}" for key, version in sorted(made.program.plan.versions.items())]
        found += [*option_lines(self.options), f"plan {'new' if given is None else 'given'}"]
        found += batch_lines(batch) if self.options.has_budget else []
        found += [] if self.parallelism is None else self.parallelism.lines
        return [*found, *made.program.collectives]

    def build(self, batch: tuple[Any, ...], kwargs: dict[str, Any], given: Plan | None = None) -> StepPlan:
        """Return the plan of calls like this one, the `given` one or a new one."""
        _require_no_gradients((batch, kwargs))
        require_real(self._loss, batch, kwargs)
        first = self.plans.main is None

        def make() -> tuple[Runner, ProfileGuide | None]:
            """Return the program, traced, planned and tried."""
            options = self.options
            how, where = options.kernels, options.device
            loss = capture_loss(self._loss, self._optimizer, batch, kwargs, device=where, kernels=how)
            captured = loss.step(
                clip_grad_norm=options.clip_grad_norm, rates_in_memory=options.cuda_graph, in_place=options.in_place
            )
            traced = first_variant(captured, options)
            if first:
                captured.warn()
                self.guards = StepGuards(self._loss, self._optimizer)
            self.guards.look_again()
            if not options.allow_unsynchronized:
                require_collective([traced.graph])
            return self.program(traced, captured, given, others=[of.program.plan for of in self.plans])

        program, guide = self.by_default(make)
        plan = StepPlan(modes=self.guards.modes(), update_key=self.guards.update_key, program=program)
        self.plans.main = self.plans.main or plan
        self.guides += [] if guide is None else [guide]
        return plan

    def give_back_arena(self) -> None:
        """Give the arena back until a step runs in it, because one runs without a plan now."""
        if self.arena is not None:
            give_back(self.arena)


def _require_no_gradients(batch: Any) -> None:
    """Raise `UnsupportedCall` for an input that requires a gradient: a compiled step computes none for inputs."""
    for name, leaf in named_leaves(*batch):
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            what = "requires a gradient, which a compiled step does not compute"
            hint = "pass it detached; make what computes it a part of the model, or use memplan.compile"
            raise UnsupportedCall(what, where=f"{name} of the example batch", hint=hint, see="batch-gradient")
