"""`CompiledModule`, which `memplan.compile` returns: a model that runs in one planned arena."""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InputMismatch, InvalidShapes, MemplanError, StaleActivationsError
from memplan.runtime.api.builder import Builder
from memplan.runtime.api.pickling import example_of, in_modes, rebuild, recipe
from memplan.runtime.api.select import RunsEagerly, Selector
from memplan.runtime.debug.hooks import Hooks
from memplan.runtime.execute.arena_gradients import ArenaGradients, GradientsInUse, referred
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards import transforms
from memplan.runtime.memory.arena import Arena
from memplan.runtime.on_demand.on_demand_offload import OnDemandOffload, offload_for
from memplan.runtime.options import CompileOptions
from memplan.runtime.profiling.profile_guided import MeasuredStep, ProfileGuide
from memplan.trace.capture.refusals import require_traceable

if TYPE_CHECKING:
    from memplan.symbolic import SymbolicPlan

_log = logging.getLogger("memplan")
_STILL_SET = (
    "%s: gradients of the last step are still set at the next call, so they are outside the arena from now on, and are "
    'added to; gradients="added" does that from the first step on, and zero_grad() before each call avoids it'
)
_KEPT = (
    "%s: something else than its parameter's .grad still refers to the gradient of %r, and keeps an arena of %s; from "
    'now on gradients are outside the arena, as with gradients="added"'
)


class CompiledModule(nn.Module, MeasuredStep):
    """A model that runs in one planned arena. `memplan.compile` makes it.

    It is called, trained and saved like the original, whose parameters, buffers and submodules it shares under the same
    names: optimizers, `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both. Calls under
    `torch.no_grad()` and in `eval()` mode run programs with plans of their own, which are made at the first such call
    and share the arena. Python attributes that `forward` reads (constants, dropout rates) are constants of a plan; each
    call compares them.

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
            args: The positional arguments: tensors with the shapes, dtypes and devices of the example.
            kwargs: The keyword arguments.

        Returns:
            What the original returns.

        Raises:
            InputMismatch: The call, or the model, differs from what was compiled (see `on_mismatch`).
            UnsupportedCall: The call needs what a planned step does not have, such as `torch.func` transforms.
            StaleActivationsError: The arena still holds the activations of a forward whose backward has not run.

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
        try:
            return self._call(args, kwargs)
        except GradientsInUse as error:
            in_use = error.gradients
        self._put_gradients_outside(in_use)
        return self._call(args, kwargs)

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a step. Raises `GradientsInUse` if gradients of the last one are in bytes that it needs."""
        try:
            runner, leaves = self._selector.select(args, kwargs)
            current = runner.current()
        except (InputMismatch, BudgetInfeasible) as error:
            how = self._requested.on_mismatch
            if how == "passive":
                return self._run_on_demand(error, args, kwargs)
            if how == "error" or isinstance(error, BudgetInfeasible):
                raise
            if how == "eager":
                return self._original(*args, **kwargs)
            try:
                runner, leaves, current = self._replan(args, kwargs)
            except RunsEagerly as why:
                return self._run_eagerly(why, args, kwargs)
        except RunsEagerly as why:
            return self._run_eagerly(why, args, kwargs)
        if self._guide is not None and runner is self._selector.main and self._guide.ready:
            runner = self._advance(self._guide)
            current = runner.current()
        return runner(leaves, current, training=runner.traced.training)

    def _put_gradients_outside(self, gradients: ArenaGradients) -> None:
        """Compile for gradients outside the arena, because those of the last step are still in use at the next call.

        They are moved out of the arena, which is then freed, unless something else than Python names refers to one.
        """
        base = self._requested if self._given is None else self._builder.options  # a given plan's budgets are there
        options = replace(base, gradients="added")
        main, modes = self._selector.main, self._selector.main_modes
        again = (example_of(main), main.traced.training, modes)
        del main
        builder = Builder(self._original, options, self.hooks)
        if options.has_budget:
            if gradients.lacks_room:
                raise _no_room(gradients)
            with in_modes(self._original, modes):
                builder.require_plan(*again[0], again[1])
        with gradients.arena.ownership:  # no other thread may begin a step in between
            gradients.move_out()
            if gradients.holder():
                gradients.move_names_out()
            if name := gradients.holder():
                if options.has_budget:
                    raise referred(name, 'or compile with gradients="added"')
                _log.warning(_KEPT, self.plan.model, name, format_bytes(gradients.arena.nbytes))
            else:
                _log.info(_STILL_SET, self.plan.model)
                gradients.arena.release()
        self.__dict__.update(_requested=options, _builder=builder, _given=None, _guide=None, _example=again)
        self._compile_again()

    def _compile_again(self) -> None:
        """Compile from the example of the first time, which is kept until that has succeeded."""
        assert self._example is not None
        (args, kwargs), train, modes = self._example
        with in_modes(self._original, modes):
            self._compile(args, kwargs, train)
        self.__dict__["_example"] = None

    def _replan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any], list[torch.Tensor]]:
        """Return a program for a call that differs from the example, or for a model that has changed."""
        try:
            runner, leaves = self._selector.replan(args, kwargs)
            return runner, leaves, runner.current()
        except InputMismatch:  # the new program is of another model too: build all programs again
            train = self._selector.main.traced.training
            self.__dict__.update(
                _builder=Builder(self._original, self._requested, self.hooks), _given=None, _guide=None
            )
            self._compile(args, kwargs, train)
            runner, leaves = self._selector.select(args, kwargs)
            return runner, leaves, runner.current()

    def _run_eagerly(self, why: RunsEagerly, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original, and warn once: the call needs autograd, and the module was compiled in eval mode."""
        if str(why) not in self._warned:
            self._warned.add(str(why))
            how = "call it under torch.no_grad(), or compile with train=False for results without gradients"
            _log.warning("%s: compiled in eval mode; a call runs eagerly: %s; %s", self.plan.model, why, how)
        return self._original(*args, **kwargs)

    def _run_on_demand(self, reason: MemplanError, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call that has no plan eagerly, and offload saved activations on demand."""
        passive = offload_for(reason, self.plan, self._selector.main.traced.device)
        self.__dict__["passive"] = passive
        run = self._original if passive is None else partial(passive.run, self._original)
        return run(*args, **kwargs)

    @property
    def pool_bytes(self) -> int:
        """Bytes outside the arena that the CUDA graphs of all its programs keep in private pools."""
        return int(self._selector.pool_bytes)

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
        arena = self._builder.arena
        assert arena is not None
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


def _no_room(gradients: ArenaGradients) -> StaleActivationsError:
    """Return the error for gradients that, moved out of the arena, would break the budget together with it."""
    plan = gradients.plan
    assert plan.eviction is not None
    need, limit = format_bytes(plan.total + gradients.nbytes), format_bytes(plan.eviction.budget or 0)
    return StaleActivationsError(
        f"gradients of the last step are still set, and take {format_bytes(gradients.nbytes)} of the arena; moved out, "
        f"the step would need {need}, and the budget is {limit}",
        hint='call zero_grad() before each call, or compile with gradients="added", which adds to gradients outside of '
        "the arena, within the budget",
        see="gradient-kept",
    )


def in_this_thread() -> bool:
    """Return whether this thread is tracing.

    It is judged by the thread's dispatch modes, because torch's flag is set while any thread exports.
    """
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() > 0
