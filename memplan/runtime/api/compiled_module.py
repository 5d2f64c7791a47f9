"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, InputMismatch, MemplanError, StaleActivationsError, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.compilation import Compilation, compile_example
from memplan.runtime.api.fallbacks import Fallbacks
from memplan.runtime.api.idle_arena import IdleArena, RunsNow
from memplan.runtime.api.pending_calls import PendingCalls, several_can_wait
from memplan.runtime.api.pickling import example_of, modes_by_name, rebuild, recipe
from memplan.runtime.api.recompile import (
    CopyOfCompiled,
    Recompilation,
    no_example,
    of_all_sizes,
    of_changed_model,
    outside,
    several_in_flight,
    varying_sizes,
)
from memplan.runtime.api.select import BeginsToTrain, RunsEagerly, Selector, TooManyPrograms
from memplan.runtime.api.several_graphs import SeveralGraphs
from memplan.runtime.api.shared_module import SharedModule
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.arena_gradients import ArenaGradients, GradientsInUse
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaInUse, OneThread
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import MeasuredStep, ProfileGuide
from memplan.trace.capture.refusals import require_traceable

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")
_MAX_REBUILDS = 8  # times that all programs are made again because the model has changed


class CompiledModule(SharedModule, MeasuredStep):
    """A model that runs in one planned arena. `memplan.compile` makes it.

    It is called, trained and saved like the original, whose parameters, buffers and submodules it shares under the same
    names: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both. Calls under
    `torch.no_grad()`, in `eval()` mode, and those that differ from the example otherwise, run programs with plans of
    their own, which are made at the first such call and share the arena. Several calls may wait for their backward.
    Python attributes that `forward` reads (constants, dropout rates) are constants of a plan; each call compares them.

    Attributes:
        plan: The plan of training calls (of every call if compiled with `train=False`; of evaluations in a copy that
            has only evaluated so far). With `dynamic_shapes`, the plan of the example's shapes.
        symbolic: With `dynamic_shapes`, the plan for all shapes; else None.
        hooks: The hooks that are called with the events of its steps: `hooks.add(function)`.
        passive: With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None.

    Example:
        ```python
        compiled = memplan.compile(model, inputs)
        compiled(inputs).sum().backward()
        print(compiled.plan.arena_size)  # bytes
        ```
    """

    hooks: Hooks
    _compilation: Compilation
    _pending: PendingCalls | None
    _again: Recompilation | CopyOfCompiled | None
    _fallbacks: Fallbacks
    _copied: CopyOfCompiled | None
    _idle: IdleArena

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        options: CompileOptions,
        train: bool | None = None,
        given: Plan | None = None,
        copied_in: Mapping[str, bool] | list[bool] | None = None,
    ) -> None:
        """Compile `model` for the example inputs.

        `copied_in`: as a copy of a module that was compiled in these training flags, which is compiled when first used;
        a list has them in the order of the submodules.
        """
        require_traceable(model)
        super().__init__(model)
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(hooks=Hooks(), _options=options, _train=train, _pending=None, _again=None)
        self.__dict__.update(_fallbacks=Fallbacks(model, options, train, self.hooks), _calling=OneThread())
        self.__dict__.update(_copied=None, _copy_refused=None, _rebuilt=0, _sizes_refused=False)
        self.__dict__.update(_idle=IdleArena(type(model).__name__, self._running, self._calling))
        if copied_in is None:
            self.__dict__["_measurements"] = ()
            self._compile(args, kwargs, model.training if train is None else train, given)
            return
        if isinstance(copied_in, list):
            copied_in = modes_by_name(model, list(model.modules()), copied_in)
        copied = CopyOfCompiled(
            model=model,
            hooks=self.hooks,
            options=options,
            example=(args, kwargs),
            train=train,
            given=given,
            modes=copied_in,
        )
        self.__dict__.update(_again=copied, _copied=copied)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None) -> None:
        """Build the program of the example inputs; other programs are built at their first call."""
        builder = Builder(self._original, self._options, self.hooks)
        on_demand = self._train is None
        self._use(
            compile_example(
                builder, self._options, args, kwargs, train=train, backward_on_demand=on_demand, given=given
            )
        )
        self._compare_at_update()

    def _compare_at_update(self) -> None:
        """Compare new programs with eager when an optimizer updates next, if others may take their place."""
        if self._selector.main.traced.training and self._runs_now.may_change:
            self._idle.wait_for_update(self._original.parameters)

    def _use(self, made: Compilation) -> None:
        """Run the programs of a compilation from now on."""
        self.__dict__.update(_compilation=made, _measurements=made.measurements)

    def __getattr__(self, name: str) -> Any:
        if name in ("_compilation", "_measurements") and self._copied is not None:  # it was not used so far
            try:
                with self._calling:
                    if name not in self.__dict__:
                        self._use(self._copied.as_copied())
                        self.__dict__["_again"] = None
            except (BudgetInfeasible, StaleActivationsError):
                raise
            except MemplanError as refused:
                raise no_example(self._original, refused) from refused
            return self.__dict__[name]
        return super().__getattr__(name)

    @property
    def plan(self) -> Plan:
        """The plan of training calls (of every call if compiled with `train=False`)."""
        running = None if self._pending is None else self._pending.plan_of(self._selector.main)
        return self._compilation.plan if running is None else running

    @property
    def symbolic(self) -> SymbolicPlan | None:
        """With `dynamic_shapes`, the plan for all shapes; else None."""
        return self._compilation.symbolic

    @property
    def passive(self) -> OnDemandOffload | None:
        """With `on_mismatch="passive"`, the state of the last call that ran without a plan; else None."""
        return self._fallbacks.passive

    @property
    def _several(self) -> SeveralGraphs | None:
        return self._fallbacks.several

    @property
    def _selector(self) -> Selector:
        return self._compilation.selector

    @property
    def _builder(self) -> Builder:
        return self._compilation.builder

    @property
    def _guide(self) -> ProfileGuide | None:
        return self._compilation.guide

    def _running(self) -> RunsNow | None:
        """Return what it runs now; None if it is not compiled so far."""
        return self._runs_now if "_compilation" in self.__dict__ else None

    @property
    def _runs_now(self) -> RunsNow:
        fixed = self._several is not None or self._again is not None or self._guide is not None
        return RunsNow(compilation=self._compilation, pending=self._pending, fixed=fixed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, with the arguments of the original.

        Args:
            args: The positional arguments. `on_mismatch` says what happens if they differ from the example.
            kwargs: The keyword arguments.

        Returns:
            What the original returns.

        Raises:
            InputMismatch: With `on_mismatch="error"`, the call, or the model, differs from what was compiled.
            BudgetInfeasible: No plan for this call, or for another call in flight, keeps the budget.
            UnsupportedCall: The call needs what a planned step does not have, such as `torch.func` transforms.
            StaleActivationsError: Another thread runs a step, or the arena holds the activations of another call where
                only one may be in flight (`gradients="arena"`, `cuda_graph`, `device`).

        Example:
            ```python
            compiled(inputs).sum().backward()
            ```
        """
        # this module is part of a model that is being traced: the outer plan contains it
        if torch.compiler.is_compiling() and in_this_thread():
            return self._original(*args, **kwargs)
        if transforms.around() and (refused := transforms.refusal((args, kwargs), self)):
            if self._options.on_mismatch == "eager":
                return self._original(*args, **kwargs)
            raise refused
        with self._calling:
            return self._call_in_this_thread(args, kwargs)

    def _call_in_this_thread(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step; programs are made, and made again, in here alone."""
        if self._again is not None:
            if self._again is self._copied:
                if (why := self._compile_copy(args, kwargs)) is not None:
                    return self._fallbacks.uncompiled(why, args, kwargs)
            else:
                self._compile_again(args, kwargs)
        self._idle.begin_call()
        if self._pending is None:
            try:
                return self._call(args, kwargs)
            except GradientsInUse as error:
                in_use: ArenaGradients | None = error.gradients
            except ArenaInUse:
                if not several_can_wait(self._options):
                    raise
                in_use = None
            if in_use is not None:
                self._put_gradients_outside(in_use, args, kwargs)
                return self._call(args, kwargs)
            self._let_calls_wait(args, kwargs)
        assert self._pending is not None
        with self._pending:
            return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step. Raises `GradientsInUse` if gradients of the last one are in bytes that it needs."""
        try:
            runner, leaves = self._selector.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            return self._call_that_differs(error, args, kwargs)
        except RunsEagerly as why:
            return self._fallbacks.eagerly(why, self._compilation, args, kwargs)
        except BeginsToTrain:
            return self._begin_to_train(args, kwargs)
        except UnsupportedGraph as refused:  # in this mode
            return self._as_several(refused, refused, args, kwargs)
        if self._guide is not None:
            runner, current = self._compilation.measured(runner, current)
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
        if self._builder.smaller:
            runner, current = self._made_smaller(runner, leaves)
        if self._several is not None:
            self._several.make_room(self._options, runner.plan)
        if self._pending is not None:
            tried = functools.partial(self._builder.tried, leaves=leaves)
            instance = self._pending.program(runner, self._selector.programs_of_calls, tried)
            if instance is None:
                return self._original(*args, **kwargs)
            runner, current = instance, instance.current()
        try:
            return runner(leaves, current, training=runner.traced.training)
        except InputMismatch as shared:  # an input is a tensor that the step changes, which no plan is for
            return self._fallbacks.without_plan(shared, shared, self._compilation, args, kwargs)

    def _made_smaller(self, runner: Runner, leaves: list[Any]) -> tuple[Runner, list[torch.Tensor]]:
        """Return what takes the place of a program that is to be smaller, and its parameters."""
        made = self._builder.made_smaller(runner, leaves)
        if made is not runner:
            self._selector.replace(runner, made)
            if made is self._selector.main:
                self._compilation.plan = made.plan
        return made, made.current()

    def _call_that_differs(
        self, differs: InputMismatch | BudgetInfeasible, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what `on_mismatch` says with a call for which there is no program yet."""
        if self._options.on_mismatch != "replan" or isinstance(differs, BudgetInfeasible):
            return self._fallbacks.without_plan(differs, None, self._compilation, args, kwargs)
        try:
            runner, leaves, current = self._replan(args, kwargs, differs)
        except RunsEagerly as why:
            return self._fallbacks.eagerly(why, self._compilation, args, kwargs)
        except BeginsToTrain:
            return self._begin_to_train(args, kwargs)
        except TooManyPrograms:
            if self._plan_all_sizes(args, kwargs):
                return self._call(args, kwargs)
            return self._fallbacks.without_plan(differs, None, self._compilation, args, kwargs)
        except (BudgetInfeasible, StaleActivationsError):
            raise
        except UnsupportedGraph as refused:
            return self._as_several(differs, refused, args, kwargs)
        except MemplanError as refused:
            return self._fallbacks.without_plan(differs, refused, self._compilation, args, kwargs)
        return self._run(runner, leaves, current, args, kwargs)

    def _as_several(
        self, differs: MemplanError, refused: UnsupportedGraph, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run a call that one graph cannot hold."""
        return self._fallbacks.as_several_graphs(differs, refused, self._compilation, self._made_way, args, kwargs)

    def _made_way(self) -> bool:
        """Free the arena for graphs that have another one, if nothing in it is in use; its programs are made anew."""
        if self._pending is not None:
            return self._pending.release()
        try:
            self._builder.free_arena()
        except (StaleActivationsError, GradientsInUse):
            return False
        return True

    def _put_gradients_outside(self, gradients: ArenaGradients, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for gradients outside the arena, because those of the last step are still in use at the next call."""
        self.__dict__["_again"] = outside(self._compilation, gradients, (args, kwargs))
        self._compile_again(args, kwargs)

    def _compile_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile once more, for a call; until that has succeeded, it is to be done, as the arena is freed already."""
        assert isinstance(self._again, Recompilation)
        self._use(self._again.for_call((args, kwargs)).run())
        self.__dict__["_again"] = None
        self._compare_at_update()

    def _begin_to_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compile a copy, which was only evaluated so far, as what it is a copy of was compiled, and call it."""
        self._builder.free_arena()
        if (refused := self._compile_copy(args, kwargs, self._builder)) is not None:
            return self._fallbacks.uncompiled(refused, args, kwargs)
        return self._call(args, kwargs)

    def _compile_copy(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], before: Builder | None = None
    ) -> MemplanError | None:
        """Compile a copy at its first call, or the first that trains: from the example, or from this call's inputs.

        `before`: the builder of its evaluations. Returns why it cannot be compiled; None if it is.
        """
        copied = self._copied
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
                if self._options.on_mismatch != "replan":
                    break
                continue
            self.__dict__.update(_again=None, _copied=replace(candidate, example=example_of(made.selector.main)))
            self._use(made)
            return None
        self.__dict__.update(_rebuilt=self._rebuilt + 1, _copy_refused=copy.copy(refused))  # without its traceback
        return refused

    def _let_calls_wait(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Compile for several calls in flight, because one begins while another waits for its backward."""
        made, pending = several_in_flight(self._compilation, self._arena, (args, kwargs))
        self._use(made)
        self.__dict__["_pending"] = pending

    def _replan(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: InputMismatch
    ) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """Return a program for a call that differs from the example, or for a model that has changed.

        Raises `TooManyPrograms` if the limit of programs, or of changes, is reached.
        """
        try:
            runner, leaves = self._selector.replan(args, kwargs, reason)
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
        self.__dict__["_rebuilt"] += 1
        what = "%s: the model has changed; all its programs are made again (change %d of %d): %s"
        _log.info(what, self.plan.model, self._rebuilt, _MAX_REBUILDS, changed.summary)
        self._use(of_changed_model(self._compilation, args, kwargs))
        self._compare_at_update()
        runner, leaves = self._selector.select(args, kwargs)
        return runner, leaves, runner.current()

    def _plan_all_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compile for all sizes, if sizes are all in which this call and those with programs differ, and it can be."""
        found = None if self._sizes_refused else varying_sizes(self._compilation, args, kwargs)
        if found is None:
            return False
        made = of_all_sizes(self._compilation, *found)
        if made is None:
            self.__dict__["_sizes_refused"] = True
            return False
        self._use(made)
        return True

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return int(self._selector.pool_bytes)

    @property
    def _arena(self) -> Arena:
        """The arena that its programs share."""
        return self._runs_now.arena

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy again: addresses in an arena cannot be copied or pickled."""
        of_copy = self._copied
        if of_copy is not None and ("_compilation" not in self.__dict__ or self._selector.evaluates):
            # a copy that was not used so far, or only evaluated: its copies can train too
            settings = {"options": of_copy.options, "train": self._train, "given": of_copy.given}
            return rebuild, (CompiledModule, self._original, of_copy.example, {**settings, "copied_in": of_copy.modes})
        of = self._compilation
        options, given = of.builder.options, of.given
        if of.guide is not None:
            options = of.options
        elif of.measurements:
            given = of.plan
        made = recipe(self._original, of.selector.main, options, given, of.selector.main_modes_by_name, self._train)
        return rebuild, (CompiledModule, *made)


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
