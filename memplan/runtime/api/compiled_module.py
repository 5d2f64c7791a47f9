"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, InputMismatch, InvalidShapes, MemplanError, StaleActivationsError
from memplan.runtime.api.appearance import shown_as
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.gradients_outside import leave_arena, require_room_outside
from memplan.runtime.api.mismatch import UnplannedCalls, shapes_of
from memplan.runtime.api.pending_calls import PendingCalls, require_room, several_can_wait
from memplan.runtime.api.pickling import detached, example_of, in_modes, rebuild, recipe
from memplan.runtime.api.select import RunsEagerly, Selector, TooManyPrograms
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.arena_gradients import ArenaGradients, GradientsInUse
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.memory.arena import Arena
from memplan.runtime.memory.arena_ownership import ArenaInUse
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, offload_for, run_within
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import MeasuredStep, ProfileGuide
from memplan.trace.capture.refusals import require_traceable

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")
_SEVERAL = (
    "%s: a call begins while another one waits for its backward; from now on each has a program of its own, and "
    "gradients are outside of the arena"
)
_MAX_REBUILDS = 8  # times that all programs are made again because the model has changed


class CompiledModule(nn.Module, MeasuredStep):
    """A model that runs in one planned arena. `memplan.compile` makes it.

    It is called, trained and saved like the original, whose parameters, buffers and submodules it shares under the same
    names: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both. Calls under
    `torch.no_grad()`, in `eval()` mode, and those that differ from the example otherwise, run programs with plans of
    their own, which are made at the first such call and share the arena. Several calls may wait for their backward.
    Python attributes that `forward` reads (constants, dropout rates) are constants of a plan; each call compares them.

    Attributes:
        plan: The plan of training calls (of every call if compiled with `train=False`). With `dynamic_shapes`, the plan
            of the example's shapes.
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

    plan: Plan
    symbolic: SymbolicPlan | None
    hooks: Hooks
    passive: OnDemandOffload | None
    _builder: Builder
    _warned: set[str]
    _example: tuple[tuple[tuple[Any, ...], dict[str, Any]], bool, list[bool]] | None

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        options: CompileOptions,
        train: bool | None = None,
        given: Plan | None = None,
    ) -> None:
        require_traceable(model)
        self.__dict__["_original"] = model
        mode = model.training
        super().__init__()
        self.__class__ = shown_as(type(self), model)  # for libraries that read its signature and its class
        model.training = mode
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            self.__dict__[name] = model.__dict__[name]
        # without nn.Module.__setattr__: the model may have a submodule of any name
        self.__dict__.update(
            hooks=Hooks(), passive=None, symbolic=None, _requested=options, _given=given, _guide=None, _example=None
        )
        self.__dict__.update(
            _builder=Builder(model, options, self.hooks), _measurements=[], _train=train, _warned=set()
        )
        self.__dict__.update(_unplanned=UnplannedCalls(model), _rebuilt=0, _varies=None, _pending=None)
        self._compile(args, kwargs, model.training if train is None else train)

    def _compile(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Build the program of the example inputs; other programs are built at their first call."""
        builder = self._builder
        if self._requested.dynamic_shapes is not None:
            self._compile_shapes(args, kwargs, train)
            return
        if builder.measures:
            main, guide = builder.guided(args, kwargs, train)
            self.__dict__.update(_guide=guide, _measurements=[] if guide is None else guide.measurements)
        else:
            main = builder.build(args, kwargs, train, self._given)
        self.__dict__.update(_selector=Selector(builder, main, backward_on_demand=self._train is None), plan=main.plan)

    def _compile_shapes(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool) -> None:
        """Compile for every shape within `dynamic_shapes`."""
        from memplan.runtime.api.shapes import ShapedSelector

        if self._given is not None:
            hint = "leave plan= out: the symbolic plan is made when compiling"
            raise InvalidShapes("a plan is for one shape", where="plan with dynamic_shapes", hint=hint, see="one-shape")
        selector = ShapedSelector(self._builder, args, kwargs, train=train, backward_on_demand=self._train is None)
        self.__dict__.update(_selector=selector, plan=selector.main.plan, symbolic=selector.family.plan)

    # -- calling -----------------------------------------------------------------------------------------

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
            if self._requested.on_mismatch == "eager":
                return self._original(*args, **kwargs)
            raise refused
        if self._example is not None:
            self._compile_again()
        if self._pending is None:
            try:
                return self._call(args, kwargs)
            except GradientsInUse as error:
                in_use: ArenaGradients | None = error.gradients
            except ArenaInUse:
                if not several_can_wait(self._requested):
                    raise
                in_use = None
            if in_use is not None:
                self._put_gradients_outside(in_use)
                return self._call(args, kwargs)
            self._let_calls_wait()
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
            return self._run_eagerly(why, args, kwargs)
        if self._guide is not None and runner is self._selector.main:
            runner, current = self._measured(self._guide, runner, current)
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
        if self._pending is not None:
            instance = self._pending.program(runner, self._selector.programs_of_calls)
            if instance is None:
                return self._original(*args, **kwargs)
            runner, current = instance, instance.current()
        try:
            return runner(leaves, current, training=runner.traced.training)
        except InputMismatch as shared:  # an input is a tensor that the step changes, which no plan is for
            return self._run_without_plan(shared, shared, args, kwargs)

    def _call_that_differs(
        self, differs: InputMismatch | BudgetInfeasible, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what `on_mismatch` says with a call for which there is no program yet."""
        if self._requested.on_mismatch != "replan" or isinstance(differs, BudgetInfeasible):
            return self._run_without_plan(differs, None, args, kwargs)
        try:
            runner, leaves, current = self._replan(args, kwargs, differs)
        except RunsEagerly as why:
            return self._run_eagerly(why, args, kwargs)
        except TooManyPrograms:
            if self._plan_all_sizes(args, kwargs):
                return self._call(args, kwargs)
            return self._run_without_plan(differs, None, args, kwargs)
        except (BudgetInfeasible, StaleActivationsError):
            raise
        except MemplanError as refused:
            return self._run_without_plan(differs, refused, args, kwargs)
        return self._run(runner, leaves, current, args, kwargs)

    def _run_without_plan(
        self, differs: MemplanError, refused: MemplanError | None, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the original for a call that no program is for, or raise `differs`, as `on_mismatch` says.

        `refused`: why there is no program; None if there are too many.
        """
        how, device = self._requested.on_mismatch, self._selector.main.traced.device
        if how == "passive":
            passive = offload_for(differs, self.plan, device)
            self.__dict__["passive"] = passive
            return run_within(passive, self._original, args, kwargs)
        if how == "error" or isinstance(differs, BudgetInfeasible) or differs.see == "no-numbers":
            raise differs
        if how == "eager":
            return self._original(*args, **kwargs)
        unplanned: UnplannedCalls = self._unplanned
        return unplanned.run(differs, refused, self.plan, device, args, kwargs)

    def _put_gradients_outside(self, gradients: ArenaGradients) -> None:
        """Compile for gradients outside the arena, because those of the last step are still in use at the next call.

        They are moved out of the arena, which is then freed, unless something else than Python names refers to one.
        """
        options = replace(self._base_options, gradients="added")
        main, modes = self._selector.main, self._selector.main_modes
        again = (example_of(main), main.traced.training, modes)
        del main
        builder = Builder(self._original, options, self.hooks)
        if options.has_budget:
            require_room_outside(gradients)
            with in_modes(self._original, modes):
                builder.require_plan(*again[0], again[1])
        leave_arena(gradients, has_budget=options.has_budget)
        self.__dict__.update(_requested=options, _builder=builder, _given=None, _guide=None, _example=again)
        self._compile_again()

    def _let_calls_wait(self) -> None:
        """Compile for several calls in flight, because one begins while another waits for its backward."""
        options, main = self._base_options, self._selector.main
        if options.measures:
            options = replace(options, costs=self._builder.options.costs)
        if options.gradients == "auto" and options.gradients_in_arena:
            options = replace(options, gradients="added")
        require_room(options, main.plan, main.arena.nbytes)
        again = (example_of(main), main.traced.training, self._selector.main_modes)
        pending = PendingCalls(options, self._arena)
        builder = Builder(self._original, options, self.hooks, pending.coordinator)
        _log.info(_SEVERAL, self.plan.model)
        self.__dict__.update(_requested=options, _builder=builder, _given=None, _guide=None, _example=again)
        self._compile_again()
        self.__dict__["_pending"] = pending

    def _compile_again(self) -> None:
        """Compile from the example of the first time, which is kept until that has succeeded."""
        assert self._example is not None
        (args, kwargs), train, modes = self._example
        with in_modes(self._original, modes):
            self._compile(args, kwargs, train)
        self.__dict__["_example"] = None

    @property
    def _base_options(self) -> CompileOptions:
        """The options of further programs, with the budgets of a given plan."""
        options: CompileOptions = self._requested if self._given is None else self._builder.options
        return options

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
        train, options = self._selector.main.traced.training, self._base_options
        self._free_arena()
        builder = Builder(self._original, options, self.hooks, self._builder.coordinator)
        self.__dict__.update(_builder=builder, _given=None, _guide=None)
        self._compile(args, kwargs, train)
        runner, leaves = self._selector.select(args, kwargs)
        return runner, leaves, runner.current()

    def _plan_all_sizes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Compile for all sizes, if sizes are all in which this call and those with programs differ, and it can be."""
        main, modes = self._selector.main, self._selector.main_modes
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if self._varies is not None or self.symbolic is not None or spec != main.traced.in_spec:
            return False
        programs = [r for r in self._selector.programs_of_calls if r.traced.in_spec == spec]
        found = shapes_of(self._original.forward, spec, [*(r.traced.example_inputs for r in programs), leaves])
        self.__dict__["_varies"] = False
        if found is None:
            return False
        shapes, example = found
        before = self._requested, self._builder, self._given, self._guide
        try:
            base = self._base_options
            options = replace(base, dynamic_shapes=shapes)
            self._free_arena()
            builder = Builder(self._original, options, self.hooks, self._builder.coordinator)
            self.__dict__.update(_requested=options, _builder=builder, _given=None, _guide=None)
            with in_modes(self._original, modes):
                example_args, example_kwargs = pytree.tree_unflatten([detached(x) for x in example], spec)
                self._compile(example_args, example_kwargs, main.traced.training)
        except (ArenaInUse, GradientsInUse):
            self.__dict__["_varies"] = None
            raise
        except MemplanError as error:
            _log.info("%s: no plan for all sizes: %s", self.plan.model, error.summary)
            self.__dict__.update(zip(("_requested", "_builder", "_given", "_guide"), before, strict=True))
            return False
        _log.info("%s: sizes keep changing; one plan for all of them: %s", self.plan.model, shapes)
        self.__dict__["_varies"] = True
        return True

    def _free_arena(self) -> None:
        """Free the arena of the programs before all of them are made again; what is run of them is made anew then."""
        arena = self._builder.arena
        if arena is not None:
            with arena.ownership as ownership:
                ownership.require_free("another program")
                arena.release()
            self._builder.arena = None

    def _run_eagerly(self, why: RunsEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original, and warn once: the call needs autograd, and the module was compiled in eval mode."""
        if str(why) not in self._warned:
            self._warned.add(str(why))
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", self.plan.model, why, how)
        return self._original(*args, **kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return int(self._selector.pool_bytes)

    def _measured(
        self, guide: ProfileGuide, runner: Runner, current: list[torch.Tensor]
    ) -> tuple[Runner, list[torch.Tensor]]:
        """Return the program of a measured step, and its parameters: another one if enough was measured."""
        if guide.runner is not runner:  # it was made anew in a larger arena: what was measured is gone
            self.__dict__["_guide"] = None
        elif guide.ready:
            runner = self._advance(guide)
            current = runner.current()
        return runner, current

    def _advance(self, guide: ProfileGuide) -> Runner:
        """Return the runner that the guide chooses, and use it from now on."""
        try:
            runner = self._selector.main = guide.next_runner()
        finally:
            if guide.done:
                self.__dict__["_guide"] = None
        self.__dict__["plan"] = runner.plan
        if guide.measurements:
            self._builder.options = replace(self._builder.options, costs=guide.measurements[-1].costs)
        return runner

    @property
    def _arena(self) -> Arena:
        """The arena that its programs share."""
        shared = None if self._pending is None else self._pending.coordinator.shared
        arena: Arena = self._builder.arena or shared or self._selector.main.arena
        return arena

    # -- being the model ---------------------------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The training flag of the original."""
        return bool(self._original.training)

    @training.setter
    def training(self, mode: bool) -> None:
        """Set the flag of the original alone, without its submodules (Lightning sets each one itself)."""
        self._original.training = mode

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the training flag of the original and its submodules.

        Args:
            mode: True to train, False to evaluate.

        Returns:
            This module.

        Example:
            ```python
            compiled.train()
            ```
        """
        self._original.train(mode)
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the `state_dict` of the original, whose hooks and extra state apply.

        Args:
            args: Those of `torch.nn.Module.state_dict`.
            kwargs: Those of `torch.nn.Module.state_dict`.

        Returns:
            The parameters and buffers, by the original's names.

        Example:
            ```python
            torch.save(compiled.state_dict(), "model.pt")
            ```
        """
        return self._original.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load a `state_dict` into the original, which shares its parameters with this module.

        Args:
            args: Those of `torch.nn.Module.load_state_dict`.
            kwargs: Those of `torch.nn.Module.load_state_dict`.

        Returns:
            The missing and the unexpected keys.

        Example:
            ```python
            compiled.load_state_dict(torch.load("model.pt"))
            ```
        """
        return self._original.load_state_dict(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Return what compiles a copy again: addresses in an arena cannot be copied or pickled."""
        options, given = self._builder.options, self._given
        if self._guide is not None:
            options = self._requested
        elif self._measurements:
            given = self.plan
        made = recipe(self._original, self._selector.main, options, given, self._selector.main_modes, self._train)
        return rebuild, (CompiledModule, *made)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the attribute on the original, whose forward is traced, unless it is this module's own."""
        own = name in self.__dict__ or hasattr(type(self), name)
        (super().__setattr__ if own else self._original.__setattr__)(name, value)

    def __delattr__(self, name: str) -> None:
        (super() if name in self.__dict__ else self._original).__delattr__(name)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
