"""Builds the programs of a model: traces, plans and assembles them, all in one arena, which grows."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.devices.host_memory import pin
from memplan.devices.kinds import is_accelerator
from memplan.errors import InputMismatch
from memplan.evict.feedback import RecordingPolicy
from memplan.planning.planfile import require_budget
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.recorders import Recorder, make_recorder
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.module_guards import ModuleGuards
from memplan.runtime.measured_budget import (
    Built,
    Measured,
    adopt_need,
    build_measured,
    first_program,
)
from memplan.runtime.memory.arena import Arena, NewArenas, arena_for, grown
from memplan.runtime.memory.arena_parts import ObservedOwnership, part_of
from memplan.runtime.memory.shared_arena import ArenaCoordinator
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide, arena_room, guide_of, safe_plan
from memplan.trace import CapturedCall, capture_call
from memplan.trace.capture.refusals import require_traceable
from memplan.trace.default_kernels import made_by_default
from memplan.trace.traced import TracedGraph

if TYPE_CHECKING:
    from memplan.runtime.kernels.kernel_selection import BoundOp
    from memplan.symbolic import SymbolicPlan
    from memplan.trace.dynamic.dims import SymbolicTrace


_Made = TypeVar("_Made")


class Builder:
    """Builds the programs of one model. Refusals are raised before an arena is allocated.

    `options` are those of the next program: the budget of a given plan and measured costs are written into them.
    `arena` is the arena that all programs share, one at a time; the first program allocates it. If a later one needs
    more, a larger arena replaces it, and `again` makes the earlier programs anew there. With a `coordinator`, which
    places programs in its own arena, each program begins in an arena of its own. `together`: the model is one that
    several ranks run together. `make_room` is called with the options and the plan of a program before an arena is
    allocated for it.
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
        self.make_room: Callable[[CompileOptions, Plan], None] = _nothing_beside
        self.model, self.hooks, self.coordinator = model, hooks, coordinator
        self._copies_gradients = options.gradients_copied and not together  # else ranks' own ops make them
        self.module_guards = ModuleGuards(model)
        self.measures = options.measures
        self.options = replace(options, costs=None) if self.measures else options
        self.arena: Arena | None = None
        self._warned = False
        self._new_arenas = NewArenas()
        self._arenas: weakref.WeakSet[Arena] = weakref.WeakSet()  # all that it has made

    def build(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None = None) -> Runner:
        """Return a program for calls like this one, with the `given` plan or a new one."""
        self._free_unused()

        def make() -> Runner:
            """Return the program, traced, planned and tried."""
            traced, captured = self._trace(args, kwargs, train)
            room = None if (arena := self._arena_now) is None else arena.nbytes
            with self._new_arenas:
                return first_program(self.options, traced, captured, self.assemble, given=given, room=room).runner

        with torch.inference_mode(False):
            runner = self._by_default(make)
            runner.forget_example()
        if given is not None and given.eviction is not None:  # other programs keep that budget too
            self.options = self.options.keeping(given)
        return runner

    def guided(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> tuple[Runner, ProfileGuide | None]:
        """Return a program whose first steps are measured, and its guide (None if nothing has to be evicted).

        Its arena has room for every plan within the budget.
        """
        with torch.inference_mode(False):
            first = self._by_default(partial(self._trace, args, kwargs, train))
            decided: list[RecordingPolicy] = []

            def build(known: Sequence[Measured | None]) -> Sequence[Built]:
                """Return the program of a safe plan, made with what is measured of it, in an arena of its own."""
                traced, plan, policy = safe_plan(self.options, *first, known=known[0])
                decided[:] = [policy]
                runner = self.assemble(traced, plan, arena_room(plan, policy))
                if self.options.budget == "min":
                    adopt_need(runner)
                return (Built(traced=traced, runner=runner),)

            with self._new_arenas:
                built = build_measured(build, 1, alone=True)[0]
            (policy,), traced, runner = decided, built.traced, built.runner
            if policy.events is None:
                runner.forget_example()
                return runner, None
            return runner, guide_of(self.options, traced, runner, policy, partial(self.assemble, traced))

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
            copy_gradients=self._copies_gradients,
            fixed=fixed,
        )
        return traced, plan_of(traced, options, redzone=options.redzone(traced.traced.device))

    def assemble(
        self, traced: TracedGraph, plan: Plan, room: int = 0, bound: tuple[BoundOp, ...] | None = None
    ) -> Runner:
        """Return the program of a plan. `room`: the least size of the arena in bytes; `bound`: as in `Runner`."""
        options = self.options
        with torch.inference_mode(False):
            return Runner(
                self.module_guards,
                traced,
                plan,
                self._arena_for(plan, traced.device, room),
                sanitize=options.sanitize,
                added=self._copies_gradients,
                recorder=self._recorder(traced.device),
                bound=bound,
                hooks=self.hooks,
            )

    def again(self, runner: Runner) -> Runner:
        """Return a program whose arena was freed, in the one that replaced it."""
        with torch.inference_mode(False):
            arena = self._arena_for(runner.plan, runner.traced.device, 0)
            return runner.remade(runner.plan, arena, recorder=self._recorder(runner.traced.device))

    def _free_unused(self) -> None:
        """Free arenas in which no step has run: another call than the example's may be all that ever comes.

        A program of theirs that is called after all is made anew then. Under a budget, an arena stays: what it needs is
        the room of other programs.
        """
        if self.measures or self.options.dynamic_shapes is not None or self.options.has_budget:
            return
        for arena in self._arenas:
            whole = getattr(arena, "whole", arena)
            if not arena.ownership.steps and not whole.ownership.released:
                whole.release()

    def free_arena(self) -> None:
        """Free the arena before all programs are made again; what runs of the present ones is made anew then.

        Raises `ArenaInUse` if a step is in flight.
        """
        arena = self._arena_now
        if arena is not None:
            with arena.ownership as ownership:
                ownership.require_free("another program")
                arena.release()
        self.arena = None

    @property
    def _arena_now(self) -> Arena | None:
        """The arena, unless it was freed: its programs are made anew when they run."""
        return None if self.arena is None or self.arena.ownership.released else self.arena

    def _recorder(self, device: torch.device) -> Recorder | None:
        return make_recorder(device, self.options.sanitize) if self.options.cuda_graph else None

    def _by_default(self, make: Callable[[], _Made]) -> _Made:
        """Return what `make` makes by the options, which are eager's kernels from now on if the default's fail."""

        def made(options: CompileOptions) -> _Made:
            self.options = options
            return make()

        self.options, found = made_by_default(self.options, type(self.model).__name__, made)
        return found

    def _trace(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> tuple[TracedGraph, CapturedCall]:
        """Return the step of a call as it is traced first, and what traces its other variants."""
        require_real(self.model, args, kwargs)
        options = self.options
        captured = capture_call(
            self.model,
            args,
            kwargs,
            train=train,
            in_place=options.in_place,
            device=options.device,
            gradients_in_arena=options.gradients_in_arena,
            copy_gradients=self._copies_gradients,
            kernels=options.kernels,
            after=options.after if train else 0,
        )
        traced = captured.first()
        if not self._warned:  # once, and not for every shape and mode
            self._warned = bool(captured.captured.warnings)
            captured.warn()
        prepare_host(self.model, traced)
        return traced, captured

    def _arena_for(self, plan: Plan, device: torch.device, room: int) -> Arena:
        """Return the shared arena; a larger one replaces it, and its bytes are freed, if the plan does not fit.

        Raises `ArenaInUse` if a step is in flight. With dynamic shapes, that step then keeps the smaller arena.
        """
        if self.coordinator is not None:
            require_budget(plan)
            self.make_room(self.options, plan)
            part = part_of(self._new_arenas.keep(Arena(plan.arena_size, device)), ObservedOwnership(self.coordinator))
            self._arenas.add(part)
            return part
        arena = self._arena_now
        varies = self.options.dynamic_shapes is not None
        if arena is None:
            self.make_room(self.options, plan)
            arena = self.arena = self._new_arenas.keep(arena_for(plan, device, room))
        elif arena.view_for(plan) is None or (varies and room > arena.nbytes):
            with arena.ownership as ownership:
                in_flight = varies and ownership.pending is not None
                if not in_flight:
                    ownership.require_free("a program that needs a larger arena")
            self.make_room(self.options, plan)
            arena = self.arena = self._new_arenas.keep(grown(arena, plan, device, room, keep=in_flight))
        self._arenas.add(arena)
        found = arena.view_for(plan)
        assert found is not None
        return found


def _nothing_beside(options: CompileOptions, plan: Plan) -> None:
    """Free nothing: there are no other arenas of the model."""


def require_real(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise `InputMismatch` naming the first parameter, buffer or input that is a fake or meta tensor."""
    from memplan.torch_inside.graphs import FakeTensor

    inputs = [(f"input {i}", x) for i, x in enumerate(pytree.tree_leaves((args, kwargs)))]
    for name, tensor in (*model.named_parameters(), *model.named_buffers(), *inputs):
        if isinstance(tensor, torch.Tensor) and (tensor.is_meta or isinstance(tensor, FakeTensor)):
            hint = "memplan.plan needs no real tensors; compile does: materialise the model and its inputs first"
            raise InputMismatch(
                f"a fake or {tensor.device} tensor has no data to compute with",
                where=name,
                hint=hint,
                see="no-numbers",
            )


def prepare_host(model: nn.Module, traced: TracedGraph, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Pin the parameters, buffers and optimizer state that a step on an accelerator copies from and to the host.

    Their bytes move to page-locked memory, once; the tensors stay the same objects.
    """
    if traced.runs_on and is_accelerator(traced.device):
        pin(model.parameters())
        pin(model.buffers())
        if optimizer is not None:
            state = (t for state in optimizer.state.values() for t in state.values())
            pin(t for t in state if isinstance(t, torch.Tensor))
