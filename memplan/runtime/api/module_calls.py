"""`ModuleCalls`: runs the calls of a compiled module, and makes the programs that they need.

A call is run by the program that it is for. Where there is none, one is made, or all are made again by other options:
for several calls in flight, for a model that has changed, for all sizes. What no
program can be for goes to `fallbacks.py`.
"""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, InputMismatch, MemplanError, StaleActivationsError, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.compilation import Compilation, compile_example
from memplan.runtime.api.fallbacks import Fallbacks
from memplan.runtime.api.pending_calls import PendingCalls, several_can_wait
from memplan.runtime.api.pickling import Example, example_of
from memplan.runtime.api.recompile import (
    CopyOfCompiled,
    no_example,
    of_all_sizes,
    of_changed_model,
    several_in_flight,
    varying_sizes,
)
from memplan.runtime.api.select import BeginsToTrain, RunsEagerly, Selector, TooManyPrograms
from memplan.runtime.api.several_graphs import SeveralGraphs
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.runner import Runner
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaInUse, OneThread
from memplan.runtime.memory.idle_arenas import give_back
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import ProfileGuide

_log = logging.getLogger("memplan")
_MAX_REBUILDS = 8  # times that all programs are made again because the model has changed


class ModuleCalls:
    """The calls of one compiled module: its programs, and what they become as calls differ.

    Attributes:
        options: Those that it was compiled with.
        train: As in `memplan.compile`; None: calls of both kinds.
        copied: What it is a copy of; None for a module that `memplan.compile` made.
        pending: The programs of calls in flight, once one began while another waited for its backward.
        fallbacks: Runs calls that no program is for.
        calling: Held by calls: one thread runs at a time.
    """

    def __init__(
        self,
        model: nn.Module,
        options: CompileOptions,
        hooks: Hooks,
        train: bool | None,
        *,
        made: Compilation | None = None,
        copied: CopyOfCompiled | None = None,
    ) -> None:
        """Make those of a model that is compiled (`made`), or is to be: by `compile`; a copy, at its first use."""
        self.options, self.train, self.copied = options, train, copied
        self.pending: PendingCalls | None = None
        self.calling = OneThread()
        self.fallbacks = Fallbacks(model, options, train, hooks, self._give_back_arena)
        self._model, self._hooks = model, hooks
        self._compilation = made
        self._copy_refused: MemplanError | None = None
        self._rebuilt = 0  # times that all programs were made again
        self._sizes_refused = False

    @property
    def is_compiled(self) -> bool:
        """Whether there is a program: a copy has none before it is used."""
        return self._compilation is not None

    @property
    def compilation(self) -> Compilation:
        """The programs, and how further ones are made. A copy that was not used so far is compiled as it was copied."""
        made = self._compilation
        return self._of_copy() if made is None else made

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`)."""
        running = None if self.pending is None else self.pending.plan_of(self.selector.main)
        return self.compilation.plan if running is None else running

    @property
    def several(self) -> SeveralGraphs | None:
        """The graphs of calls that one graph cannot hold; None before the first such call."""
        return self.fallbacks.several

    @property
    def selector(self) -> Selector:
        """Chooses the program of a call."""
        return self.compilation.selector

    @property
    def builder(self) -> Builder:
        """Makes further programs."""
        return self.compilation.builder

    @property
    def guide(self) -> ProfileGuide | None:
        """Chooses the next program while steps are measured; else None."""
        return self.compilation.guide

    @property
    def arena(self) -> Arena:
        """The arena that its programs share."""
        shared = None if self.pending is None else self.pending.coordinator.shared
        return self.builder.arena or shared or self.selector.main.arena

    def compile(self, example: Example, given: Plan | None) -> None:
        """Build the program of the example inputs, by a `given` plan if there is one; others at their first call."""
        args, kwargs = example
        self._compilation = compile_example(
            *(Builder(self._model, self.options, self._hooks), self.options, args, kwargs),
            train=self._model.training if self.train is None else self.train,
            backward_on_demand=self.train is None,
            given=given,
        )

    def _of_copy(self) -> Compilation:
        """Compile a copy as it was copied, and return what was made."""
        assert self.copied is not None
        try:
            with self.calling:
                if self._compilation is None:
                    self._compilation = self.copied.as_copied()
                return self._compilation
        except (BudgetInfeasible, StaleActivationsError):
            raise
        except MemplanError as refused:
            raise no_example(self._model, refused) from refused

    def _give_back_arena(self) -> None:
        """Give the idle arena back until a program runs, because the original runs now."""
        if self.is_compiled:
            for arena in [self.arena] if self.pending is None else self.pending.arenas:
                give_back(arena)

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the model for the arguments of a call; programs are made, and made again, in here alone."""
        with self.calling:
            return self._run_alone(args, kwargs)

    def _run_alone(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call while no other thread runs one."""
        if not self.is_compiled and (why := self._compile_copy(args, kwargs)) is not None:
            return self.fallbacks.uncompiled(why, args, kwargs)
        if self.pending is None:
            try:
                return self._call(args, kwargs)
            except ArenaInUse:
                if not several_can_wait(self.options):
                    raise
            self._let_calls_wait(args, kwargs)
        assert self.pending is not None
        with self.pending:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step. Raises `ArenaInUse` while another one waits for its backward in the only arena."""
        try:
            runner, leaves = self.selector.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            return self._call_that_differs(error, args, kwargs)
        except RunsEagerly as why:
            return self.fallbacks.eagerly(why, self.compilation, args, kwargs)
        except BeginsToTrain:
            return self._begin_to_train(args, kwargs)
        except UnsupportedGraph as refused:  # in this mode
            return self._as_several(refused, refused, args, kwargs)
        if self.guide is not None:
            runner, current = self.compilation.measured(runner, current)
        return self._run(runner, leaves, current, args, kwargs)

    def _run(
        self,
        runner: Runner,
        leaves: list[Any],
        current: list[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a program with the leaves of a call and the current parameters."""
        if self.several is not None:
            self.several.make_room(self.options, runner.plan)
        if self.pending is not None:
            instance = self.pending.program(runner, self.selector.programs_of_calls)
            if instance is None:
                return self._model(*args, **kwargs)
            runner, current = instance, instance.current()
        try:
            return runner(leaves, current, training=runner.traced.training)
        except InputMismatch as shared:  # an input is a tensor that the step changes, which no plan is for
            return self.fallbacks.without_plan(shared, shared, self.compilation, args, kwargs)

    def _call_that_differs(
        self, differs: InputMismatch | BudgetInfeasible, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what `on_mismatch` says with a call for which there is no program yet."""
        if self.options.on_mismatch != "replan" or isinstance(differs, BudgetInfeasible):
            return self.fallbacks.without_plan(differs, None, self.compilation, args, kwargs)
        try:
            runner, leaves, current = self._replan(args, kwargs, differs)
        except RunsEagerly as why:
            return self.fallbacks.eagerly(why, self.compilation, args, kwargs)
        except BeginsToTrain:
            return self._begin_to_train(args, kwargs)
        except TooManyPrograms:
            if self._plan_all_sizes(args, kwargs):
                return self._call(args, kwargs)
            return self.fallbacks.without_plan(differs, None, self.compilation, args, kwargs)
        except (BudgetInfeasible, StaleActivationsError):
            raise
        except UnsupportedGraph as refused:
            return self._as_several(differs, refused, args, kwargs)
        except MemplanError as refused:
            return self.fallbacks.without_plan(differs, refused, self.compilation, args, kwargs)
        return self._run(runner, leaves, current, args, kwargs)

    def _as_several(
        self, differs: MemplanError, refused: UnsupportedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that one graph cannot hold."""
        return self.fallbacks.as_several_graphs(differs, refused, self.compilation, self._made_way, args, kwargs)

    def _made_way(self) -> bool:
        """Free the arena for graphs that have another one, if nothing in it is in use; its programs are made anew."""
        if self.pending is not None:
            return self.pending.release()
        try:
            self.builder.free_arena()
        except MemplanError:
            return False
        return True

    def _begin_to_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a copy, which was only evaluated so far, as what it is a copy of was compiled, and call it."""
        self.builder.free_arena()
        if (refused := self._compile_copy(args, kwargs, self.builder)) is not None:
            return self.fallbacks.uncompiled(refused, args, kwargs)
        return self._call(args, kwargs)

    def _compile_copy(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Builder | None = None
    ) -> MemplanError | None:
        """Compile a copy at its first call, or the first that trains: from the example, or from this call's inputs.

        `before`: the builder of its evaluations. Returns why it cannot be compiled; None if it is.
        """
        copied = self.copied
        assert copied is not None
        refused: MemplanError | None = self._copy_refused
        if self._rebuilt >= _MAX_REBUILDS:
            return refused
        for candidate in (copied.of_call(args, kwargs), copied.changed(args, kwargs)):
            try:
                made = candidate.run() if before is None else candidate.as_copied(before)
            except (BudgetInfeasible, StaleActivationsError):
                raise
            except MemplanError as error:
                refused = error
                if self.options.on_mismatch != "replan":
                    break
                continue
            self.copied = replace(candidate, example=example_of(made.selector.main))
            self._compilation = made
            return None
        self._rebuilt, self._copy_refused = self._rebuilt + 1, copy.copy(refused)  # without its traceback
        return refused

    def _let_calls_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for several calls in flight, because one begins while another waits for its backward."""
        made, pending = several_in_flight(self.compilation, self.arena, (args, kwargs))
        self._compilation = made
        self.pending = pending

    def _replan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: InputMismatch
    ) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """Return a program for a call that differs from the example, or for a model that has changed.

        Raises `TooManyPrograms` if the limit of programs, or of changes, is reached.
        """
        try:
            runner, leaves = self.selector.replan(args, kwargs, reason)
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
        _log.info(what, self.plan.model, self._rebuilt, _MAX_REBUILDS, changed.summary)
        self._compilation = of_changed_model(self.compilation, args, kwargs)
        runner, leaves = self.selector.select(args, kwargs)
        return runner, leaves, runner.current()

    def _plan_all_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compile for all sizes, if sizes are all in which this call and those with programs differ, and it can be."""
        found = None if self._sizes_refused else varying_sizes(self.compilation, args, kwargs)
        if found is None:
            return False
        made = of_all_sizes(self.compilation, *found)
        if made is None:
            self._sizes_refused = True
            return False
        self._compilation = made
        return True
