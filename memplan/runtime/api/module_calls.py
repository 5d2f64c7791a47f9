"""`ModuleCalls`: runs the calls of a compiled module, and makes the programs that they need.

A call is run by the program that it is for. Where there is none, one is made, or all are made again for the call that
needs it: for several calls in flight, for a model that has changed. What one graph cannot hold runs as several, and
what no program can be for runs as `on_mismatch` says.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import (
    BudgetInfeasible,
    InputMismatch,
    InvalidShapes,
    MemplanError,
    PlanMismatch,
    StaleActivationsError,
    UnsupportedGraph,
)
from memplan.runtime.api.module_builder import ModuleBuilder
from memplan.runtime.api.module_programs import ModulePrograms, RunsEagerly
from memplan.runtime.api.on_demand_offload import OnDemandOffload, offload_within, run_within
from memplan.runtime.api.symbolic_programs import SymbolicPrograms
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.dynamo.backend import SeveralGraphs, can_be_several
from memplan.runtime.execute.instances import PendingCalls, several_can_wait
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import CallKind, kind_of_call, require_like
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaInUse, OneThread
from memplan.runtime.memory.idle_arenas import give_back
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.op_timer import Measurement
from memplan.runtime.profiling.profile_guided import ProfileGuide
from memplan.runtime.programs import Programs, TooManyPrograms
from memplan.trace.capture.refusals import why_it_breaks

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")
_MAX_REBUILDS = 8  # times that all programs are made again because the model has changed
_APART = "%s: a kind of call is planned as several graphs, because one cannot hold it: %s; .plan is that of the others"
_SEVERAL = (
    "%s: a call begins while another one waits for its backward; from now on each has a program of its own, and "
    "gradients are outside of the arena"
)
_UNPLANNED = "%s: a call runs %s, without a plan: %s; it gets no program: %s; next step: %s; this is logged once"
_FEWER = (
    "name the dimensions that vary in dynamic_shapes=, call it in fewer ways, or compile another module for such calls"
)

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class ModuleCalls:
    """The calls of one compiled module: its programs, and what they become as calls differ.

    Attributes:
        options: Those by which its programs are made, with the budgets of a given plan.
        train: As in `memplan.compile`; None: calls of both kinds.
        given: The plan that was passed; None: there was none.
        kind: What the example is like, or what the first call of a copy is to be like; None: not known.
        pending: The programs of calls in flight, once one began while another waited for its backward.
        hooks: The hooks that are called with the events of its steps.
        several: The graphs of calls that one graph cannot hold; None before the first such call.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.
        guide: Chooses the next program while steps are measured; else None.
        measurements: What was measured so far.
        symbolic: With `dynamic_shapes`, the plan for all shapes; else None.
        calling: Held by calls: one thread runs at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        train: bool | None,
        *,
        given: Plan | None = None,
        kind: CallKind | None = None,
        together: bool = False,
    ) -> None:
        """Make those of a model that is compiled by `compile`, or at its first call. `together`: of `ModuleBuilder`."""
        self.options, self.train, self.given, self.kind = options, train, given, kind
        self.pending: PendingCalls | None = None
        self.several: SeveralGraphs | None = None
        self.passive: OnDemandOffload | None = None
        self.guide: ProfileGuide | None = None
        self.measurements: Sequence[Measurement] = ()
        self.symbolic: SymbolicPlan | None = None
        self.calling = OneThread()
        self.hooks = Hooks()
        self._model, self._together = model, together
        self._programs: ModulePrograms | None = None
        self._plan: Plan | None = None
        self._evaluates = False  # without an example, and called for an evaluation alone so far
        self._rebuilt = 0  # times that all programs were made again
        self._first: Programs[Runner] = Programs()  # knows the first calls that one graph cannot hold
        self._warned: set[str] = set()

    @property
    def programs(self) -> ModulePrograms:
        """Chooses the program of a call. Raises `InputMismatch` before the first call of a copy, or without example."""
        if self._programs is None:
            what = "a copy, or a module that was compiled without example inputs, is planned at its first call"
            raise InputMismatch(what, where=self._name, hint="call it once", see="other-model")
        return self._programs

    @property
    def builder(self) -> ModuleBuilder:
        """Makes further programs."""
        return self.programs.builder

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`)."""
        running = None if self.pending is None else self.pending.plan_of(self.programs.main)
        return running or self._plan or self.programs.main.plan

    @property
    def arena(self) -> Arena:
        """The arena that its programs share."""
        shared = None if self.pending is None else self.pending.coordinator.shared
        return self.builder.arena or shared or self.programs.main.arena

    @property
    def settings(self) -> dict[str, Any]:
        """The arguments with which the calls of a copy of the model are made, with the costs measured so far."""
        measured = self._programs is not None and self.guide is None
        options = self.builder.options if measured else self.options
        return {"options": options, "train": self.train, "given": self.given, "kind": self.kind}

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return 0 if self._programs is None else self._programs.pool_bytes

    @property
    def _name(self) -> str:
        return type(self._model).__name__

    # -- programs ----------------------------------------------------------------------------------------

    def compile(self, args: Args, kwargs: Kwargs) -> None:
        """Build the program of the example inputs, by the given plan if there is one; others at their first call."""
        train, given = self._model.training if self.train is None else self.train, self.given
        self._make(self.options, args, kwargs, train, given=given)
        self.kind = kind_of_call(args, kwargs)
        if given is not None:
            self.options = self.builder.options

    def _compile_for(self, kind: CallKind, args: Args, kwargs: Kwargs) -> None:
        """Build the program of the first call, where there was no example; one that evaluates gets no backward."""
        if self.kind is not None and self.options.on_mismatch in ("error", "eager") and not self.options.dynamic_shapes:
            require_like(self.kind, kind)
        train = self._model.training and self._records(args, kwargs) if self.train is None else self.train
        try:
            self._make(self.options, args, kwargs, train, given=self.given)
        except PlanMismatch as other:
            _log.info("%s: the given plan is not for the first call of this copy: %s", self._name, other.summary)
            self._make(self.options, args, kwargs, train)
        self.kind = self.kind or kind
        self._evaluates = self.train is None and not train

    def _make(
        self,
        options: CompileOptions,
        args: Args,
        kwargs: Kwargs,
        train: bool,
        *,
        given: Plan | None = None,
        pending: PendingCalls | None = None,
    ) -> None:
        """Build a first program by some options, for a call; the programs of before stay if that fails."""
        builder = ModuleBuilder(
            self._model,
            options,
            self.hooks,
            None if pending is None else pending.coordinator,
            together=self._together,
        )
        if self.several is not None:
            builder.make_room = self.several.make_room
        on_demand, guide, symbolic = self.train is None and not self._together, None, None
        programs: ModulePrograms
        if options.dynamic_shapes is not None:
            if given is not None:
                what, hint = "a plan is for one shape", "leave plan= out: the symbolic plan is made when compiling"
                raise InvalidShapes(what, where="plan with dynamic_shapes", hint=hint, see="one-shape")
            programs = shaped = SymbolicPrograms(builder, args, kwargs, train=train, backward_on_demand=on_demand)
            symbolic = shaped.family.plan
        else:
            main, guide = builder.build(args, kwargs, train, given)
            programs = ModulePrograms(builder, main, backward_on_demand=on_demand)
        self.options, self._programs, self._plan, self.pending = options, programs, programs.main.plan, pending
        self.guide, self.symbolic = guide, symbolic
        self.measurements = self.measurements if guide is None else guide.measurements

    def _records(self, args: Args, kwargs: Kwargs) -> bool:
        """Return whether eager would record a call."""
        tensors = (*self._model.parameters(), *pytree.tree_leaves((args, kwargs)))
        return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in tensors)

    def _let_calls_wait(self, args: Args, kwargs: Kwargs) -> None:
        """Make the programs again for several calls in flight, as one begins while another waits for its backward."""
        options, before = replace(self.options, gradients="outside"), self.programs
        if options.measures:
            options = replace(options, costs=self.builder.options.costs)
        options.require_room(before.main.plan, before.main.arena.nbytes)
        pending = PendingCalls(options, self.arena)
        like, train = before.like_example(args, kwargs), before.main.traced.training
        if like is None and self.train is None:
            train = self._records(args, kwargs)
        with contextlib.nullcontext() if like is None else before.in_main_modes():
            self._make(options, *(like or (args, kwargs)), train, pending=pending)
        _log.info(_SEVERAL, self._name)

    def _replan(
        self, args: Args, kwargs: Kwargs, reason: InputMismatch
    ) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """Return a program for a call that differs from the example, or for a model that has changed.

        Raises `TooManyPrograms` if the limit of programs, or of changes, is reached.
        """
        try:
            runner, leaves = self.programs.replan(args, kwargs, reason)
        except InputMismatch as refused:
            if refused.see != "other-model":
                raise
            changed = refused
        else:
            try:
                return runner, leaves, runner.current()
            except InputMismatch as refused:
                changed = refused
        # the new program is of another model too: build all programs again
        if self._rebuilt >= _MAX_REBUILDS:
            raise TooManyPrograms from None
        self._rebuilt += 1
        what = "%s: the model has changed; all its programs are made again (change %d of %d): %s"
        _log.info(what, self._name, self._rebuilt, _MAX_REBUILDS, changed.summary)
        self.builder.free_arena()
        self._make(self.options, args, kwargs, self.programs.main.traced.training, pending=self.pending)
        runner, leaves = self.programs.select(args, kwargs)
        return runner, leaves, runner.current()

    def _measured(self, guide: ProfileGuide, runner: Runner) -> Runner:
        """Return the program of a step: another program if enough of this one was measured."""
        if not guide.ready:
            return runner
        try:
            runner = self.programs.main = guide.next_runner()
        finally:
            if guide.done:  # no other plan is tried
                self.guide = None
                self.programs.main.forget_example()
        self._plan = runner.plan
        if guide.measurements:
            self.builder.options = replace(self.builder.options, costs=guide.measurements[-1].costs)
        return runner

    # -- calls -------------------------------------------------------------------------------------------

    def run(self, args: Args, kwargs: Kwargs) -> Any:
        """Run the model for the arguments of a call; programs are made, and made again, in here alone."""
        with self.calling:
            begins = self._evaluates and self.pending is None and self._model.training and self._records(args, kwargs)
            key = (kind_of_call(args, kwargs), self._model.training) if begins or self._programs is None else None
            try:
                if key is not None:
                    self._first.require(key)
                    if begins:
                        self.builder.free_arena()
                    self._compile_for(key[0], args, kwargs)
            except UnsupportedGraph as refused:
                self._first.refuse(key, refused)
                return self._as_several(refused, refused, args, kwargs)
            except (BudgetInfeasible, StaleActivationsError) as refused:
                if not isinstance(refused, ArenaInUse) or not several_can_wait(self.options):
                    raise
            except MemplanError as refused:
                return self._without_plan(refused, refused, args, kwargs)
            if self.pending is None:
                try:
                    return self._call(args, kwargs)
                except ArenaInUse:
                    if not several_can_wait(self.options):
                        raise
                try:
                    self._let_calls_wait(args, kwargs)
                except UnsupportedGraph as refused:
                    return self._as_several(refused, refused, args, kwargs)
            assert self.pending is not None
            self.pending.begin()
            return self._call(args, kwargs)

    def _call(self, args: Args, kwargs: Kwargs) -> Any:
        """Run a step. Raises `ArenaInUse` while another one waits for its backward in the only arena."""
        try:
            runner, leaves = self.programs.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            return self._call_that_differs(error, args, kwargs)
        except RunsEagerly as why:
            return self._eagerly(str(why), args, kwargs)
        except UnsupportedGraph as refused:  # in this mode
            return self._as_several(refused, refused, args, kwargs)
        if self.guide is not None and runner is self.programs.main:
            runner = self._measured(self.guide, runner)
            current = runner.current()
        return self._run(runner, leaves, current, args, kwargs)

    def _run(self, runner: Runner, leaves: list[Any], current: list[torch.Tensor], args: Args, kwargs: Kwargs) -> Any:
        """Run a program with the leaves of a call and the current parameters."""
        if self.several is not None:
            self.several.make_room(self.options, runner.plan)
        if self.pending is not None:
            instance = self.pending.program(runner, tuple(self.programs))
            if instance is None:
                return self._model(*args, **kwargs)
            runner, current = instance, instance.current()
        try:
            return runner(leaves, current, training=runner.traced.training)
        except InputMismatch as shared:  # an input is a tensor that the step changes, which no plan is for
            return self._without_plan(shared, shared, args, kwargs)

    def _call_that_differs(self, differs: InputMismatch | BudgetInfeasible, args: Args, kwargs: Kwargs) -> Any:
        """Do what `on_mismatch` says with a call for which there is no program yet."""
        if self.options.on_mismatch != "replan" or isinstance(differs, BudgetInfeasible):
            return self._without_plan(differs, None, args, kwargs)
        try:
            runner, leaves, current = self._replan(args, kwargs, differs)
        except RunsEagerly as why:
            return self._eagerly(str(why), args, kwargs)
        except TooManyPrograms:
            return self._without_plan(differs, None, args, kwargs)
        except (BudgetInfeasible, StaleActivationsError):
            raise
        except UnsupportedGraph as refused:
            return self._as_several(differs, refused, args, kwargs)
        except MemplanError as refused:
            return self._without_plan(differs, refused, args, kwargs)
        return self._run(runner, leaves, current, args, kwargs)

    # -- calls without a program -------------------------------------------------------------------------

    def _as_several(self, differs: MemplanError, refused: UnsupportedGraph, args: Args, kwargs: Kwargs) -> Any:
        """Run a call that one graph cannot hold: as several graphs if that helps, else without a plan.

        `differs`: how the call differs from the example; `refused` itself if it is in another mode.
        """
        options = self.options
        if options.fullgraph and differs is refused:
            raise refused
        several = options.on_mismatch == "replan" and not options.fullgraph and can_be_several(refused, options)
        if not several or not (self._made_way() or not options.has_budget):
            return self._without_plan(differs, refused, args, kwargs)
        if self.several is None:
            _log.warning(_APART, self._name, why_it_breaks(refused))
            self.several = SeveralGraphs(self._model, options, self.hooks)
            if self._programs is not None:
                self.builder.make_room = self.several.make_room
        with torch.no_grad() if self.train is False else contextlib.nullcontext():
            return self.several(*args, **kwargs)

    def _made_way(self) -> bool:
        """Free the arena for graphs that have another one, if nothing in it is in use; its programs are made anew."""
        if self._programs is None:
            return True
        if self.pending is not None:
            return self.pending.release()
        try:
            self.builder.free_arena()
        except MemplanError:
            return False
        return True

    def _without_plan(self, differs: MemplanError, refused: MemplanError | None, args: Args, kwargs: Kwargs) -> Any:
        """Run the original for a call, or raise `differs`, as `on_mismatch` says; a budget offloads on demand.

        `refused`: why there is no program; None if there are too many.
        """
        how = self.options.on_mismatch
        refuses = isinstance(differs, BudgetInfeasible) or differs.see == "no-numbers"
        unknown = self._programs is None and (how == "passive" or self.options.has_budget)  # the bytes of a plan
        if how == "error" or unknown or (refuses and how != "passive"):
            raise differs
        offload = None
        if self._programs is not None:
            self._give_back_arena()
            device = self.programs.main.traced.device
            if how == "passive":
                offload = self.passive = offload_within(self.plan, device, differs)
            elif how == "replan":
                offload = offload_within(self.plan, device)
        result = run_within(offload, self._model, args, kwargs)  # if that fails too, eager's own error says it all
        if how == "replan" and "unplanned" not in self._warned:
            self._warned.add("unplanned")
            within = "eagerly" if offload is None else f"eagerly within {format_bytes(offload.budget)}"
            other = "it is in another mode" if differs is refused else differs.summary
            why, hint = f"there are {Programs.most} programs for other calls", _FEWER
            if refused is not None:
                why, hint = refused.summary.splitlines()[0], refused.hint or _FEWER
            _log.warning(_UNPLANNED, self._name, within, other, why, hint)
        return result

    def _eagerly(self, why: str, args: Args, kwargs: Kwargs) -> Any:
        """Run the original, and warn once: the call needs autograd, and the module was compiled in eval mode."""
        if why not in self._warned:
            self._warned.add(why)
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", self._name, why, how)
        self._give_back_arena()
        return self._model(*args, **kwargs)

    def _give_back_arena(self) -> None:
        """Give the idle arena back until a program runs, because the original runs now."""
        for arena in [self.arena] if self.pending is None else self.pending.arenas:
            give_back(arena)
