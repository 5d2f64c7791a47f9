"""Builds the programs of a compiled module: traces its calls for the builder of all programs."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.runtime.builder import ProgramBuilder
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import require_real
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide
from memplan.trace import CapturedCall, capture_call
from memplan.trace.capture.refusals import require_traceable
from memplan.trace.traced import TracedGraph
from memplan.trace.variants import first_variant

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan
    from memplan.trace.dynamic.dims import SymbolicTrace


class ModuleBuilder(ProgramBuilder[CompileOptions]):
    """Builds the programs of one model.

    `options` are those of the next program: the budget of a given plan and measured costs are written into them; only
    the first program is measured. `together`: the model is one that several ranks run together.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        hooks: Hooks,
        coordinator: ArenaCoordinator | None = None,
        *,
        together: bool = False,
    ) -> None:
        if not together:
            require_traceable(model)
        added = options.gradients_copied and not together  # else ranks' own ops make them
        super().__init__(options, type(model).__name__, hooks, coordinator, added=added)
        self.model, self.guards = model, ModuleGuards(model)
        self._warned = False
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()  # all that it has made

    def build(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None = None
    ) -> tuple[Runner, ProfileGuide | None]:
        """Return a program for calls like this one, with the `given` plan or a new one, and its guide if its first
        steps are measured."""
        self._free_unused()
        found = self.by_default(lambda: self.program(*self._trace(args, kwargs, train), given))
        if self.options.measures:  # the first program alone is measured
            self.options = replace(self.options, costs=None)
        if given is not None and given.eviction is not None:  # other programs keep that budget too
            self.options = self.options.keeping(given)
        return found

    def symbolic(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, fixed: frozenset[str]
    ) -> tuple[SymbolicTrace, SymbolicPlan]:
        """Return one trace and one plan for all shapes; the symbols in `fixed` have the sizes of this call."""
        from memplan.trace.dynamic.symbolic import plan_of, trace_symbolic

        require_real(self.model, args, kwargs)
        options = self.options
        assert options.dynamic_shapes is not None
        traced = trace_symbolic(
            self.model,
            args,
            kwargs,
            dynamic_shapes=options.dynamic_shapes,
            train=train,
            in_place=options.in_place,
            gradients_in_arena=options.gradients_in_arena,
            copy_gradients=self._added,
            fixed=fixed,
        )
        return traced, plan_of(traced, options, redzone=options.redzone(traced.traced.device))

    def _free_unused(self) -> None:
        """Free arenas in which no step has run: another call than the example's may be all that ever comes.

        A program of theirs that is called after all is made anew then. Under a budget, an arena stays: what it needs is
        the room of other programs.
        """
        if self.options.dynamic_shapes is not None or self.options.has_budget:
            return
        for arena in self._arenas:
            if not arena.ownership.steps and not arena.whole.ownership.steps:
                arena.empty()

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> tuple[TracedGraph, CapturedCall]:
        """Return the step of a call as it is traced first, and what traces its other variants."""
        require_real(self.model, args, kwargs)
        how = {**self.options.tracing, "copy_gradients": self._added, "after": self.options.after if train else 0}
        captured = capture_call(self.model, args, kwargs, train=train, **how)
        traced = first_variant(captured, self.options)
        if not self._warned:  # once, and not for every shape and mode
            self._warned = bool(captured.captured.warnings)
            captured.warn()
        return traced, captured

    def _arena_for(self, plan: Plan, device: torch.device, room: int) -> Arena:
        arena = super()._arena_for(plan, device, room)
        self._arenas.add(arena)
        return arena
