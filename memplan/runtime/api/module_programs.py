"""The programs of a compiled module: which one runs a call, by its state (modes, gradients), shapes and values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.errors import BudgetInfeasible, InputMismatch, MemplanError
from memplan.runtime.api.module_builder import ModuleBuilder
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import kind_of_call
from memplan.runtime.memory.arena import Arena
from memplan.runtime.programs import Programs
from memplan.trace.capture.joint_graph import NoBackward, autocast_dtype

Example = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CallState:
    """The state in which a call is made: whether autograd records it, and the training flag of every submodule."""

    grad: bool
    modes: tuple[bool, ...]


class RunsEagerly(Exception):
    """Raised for a call that autograd records if no program with a backward is available: the original runs it."""


class ModulePrograms(Programs[Runner]):
    """The programs of a module: finds that of a call; a state that is new gets a new program.

    `main` runs calls in the state in which the module was compiled. Calls under `no_grad` and in eval mode run other
    programs in the same arena. `backward_on_demand`: if `main` has no backward, a call that eager would record gets a
    program that has one; if that cannot be planned, or its backward has not run yet, calls run eagerly (`RunsEagerly`).
    """

    main: Runner

    def __init__(self, builder: ModuleBuilder, main: Runner, *, backward_on_demand: bool = False) -> None:
        super().__init__(main)
        self.builder, self._module_guards = builder, builder.guards
        self._backward_on_demand = backward_on_demand and not main.traced.training
        if not self._backward_on_demand:  # there may be room when no call of several graphs is in flight
            self.passing = (*self.passing, BudgetInfeasible)
        self.main_modes = self._module_guards.modes()
        self._main_modules = self._module_guards.modules

    @contextlib.contextmanager
    def in_main_modes(self) -> Iterator[None]:
        """Give the submodules the training flags in which `main` runs, and reset them afterwards."""
        now = [module.training for module in self._main_modules]
        _set_modes(self._main_modules, self.main_modes)
        try:
            yield
        finally:
            _set_modes(self._main_modules, now)

    def like_example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Return the arguments of a call as those of the example, arranged as there; None if they differ from it."""
        guards = self.main.input_guards
        try:
            leaves = guards.flatten(args, kwargs)
        except InputMismatch:
            return None
        pairs = zip(leaves, guards.examples, strict=True)
        if any(x.requires_grad != known.requires_grad for x, known in pairs if isinstance(x, torch.Tensor)):
            return None
        found: Example = pytree.tree_unflatten(leaves, guards.spec)
        return found if guards.are_tied_alike(leaves) else None

    @property
    def pool_bytes(self) -> int:
        """Bytes that the CUDA graphs of all its programs keep in their private pools."""
        return sum(runner.pool_bytes for runner in self)

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """Return the runner for the current state, and the leaves of the call as that runner takes them.

        Raises `InputMismatch` naming the first difference from what the module was compiled for.
        """
        main = self.main
        modes = self._module_guards.modes()
        grad = self._records(args, kwargs)
        require_autocast(main)
        if modes != self.main_modes or grad is not main.traced.training:
            self._check_modes(modes)
            leaves = main.input_guards.flatten(args, kwargs)
            like = pytree.tree_unflatten(leaves, main.input_guards.spec)
            state = CallState(grad, tuple(modes))
            runner = self._found(self, state, state, lambda: self._built(*like, train=grad))
            self._require_free(runner.arena)
            return runner, runner.input_guards.flatten(args, kwargs, training=grad)
        self._require_free(main.arena)
        return main, main.input_guards.flatten(args, kwargs, training=grad)

    def replan(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: InputMismatch) -> tuple[Runner, list[Any]]:
        """Return the runner, kept for reuse, for a call that differs from the example; it has a plan of its own.

        Raises `TooManyPrograms` for a new one if there are as many as are kept. `reason`: how the call differs.
        """
        grad = self._records(args, kwargs)
        state = CallState(grad, tuple(self._module_guards.modes()))
        kind = (state, autocast_dtype(self.main.device_type), kind_of_call(args, kwargs))
        runner = self._found(self, state, kind, lambda: self._built(args, kwargs, train=grad), reason)
        self._require_free(runner.arena)
        return runner, runner.input_guards.flatten(args, kwargs)

    def _found(
        self,
        programs: Programs[Runner],
        state: CallState,
        kind: Any,
        make: Callable[[], Runner],
        differs: InputMismatch | None = None,
    ) -> Runner:
        """Return the program of a kind of call. Raises `RunsEagerly` for one with a backward that cannot be planned."""
        changed = []
        if list(state.modes) != list(self.main_modes):
            changed.append("some modules are in another mode" if any(state.modes) else "it is in evaluation mode")
        if state.grad is not self.main.traced.training:
            changed.append("gradients are wanted" if state.grad else "no gradients are wanted")
        try:
            return programs.of(kind, make, differs, model=self.main.plan.model, state=", ".join(changed))
        except InputMismatch:
            raise
        except MemplanError as refused:
            if self._backward_on_demand and state.grad:
                raise RunsEagerly(f"it cannot be planned with its backward ({refused})") from None
            raise

    def _records(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call goes through autograd."""
        if not torch.is_grad_enabled():
            return False
        if not self._backward_on_demand and (self.main.has_parameters or not self.main.traced.training):
            return self.main.traced.training
        given = chain(self.main.parameter_guards.tensors(), pytree.tree_leaves((args, kwargs)))
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)

    def _built(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Runner:
        """Return a new program; it has a backward if something requires a gradient."""
        self._require_free(self.builder.arena)  # the trial run overwrites its bytes
        try:
            return self.builder.build(args, kwargs, train)[0]
        except NoBackward:
            if not (self._backward_on_demand and train):
                raise
            return self.builder.build(args, kwargs, train=False)[0]

    def _require_free(self, arena: Arena | None) -> None:
        """Raise `RunsEagerly` if an evaluation would overwrite saved activations, whose backward may never run."""
        if self._backward_on_demand and arena is not None and arena.ownership.pending is not None:
            raise RunsEagerly("results of an earlier call, whose backward has not run, are still alive")

    def _check_modes(self, modes: list[bool]) -> None:
        """Raise `InputMismatch` unless all modes are as compiled, or the whole module is in eval mode."""
        if any(modes):
            self._module_guards.require_modes(self.main_modes)


def require_autocast(runner: Runner) -> None:
    """Raise `InputMismatch` unless autocast is as it was when the runner was traced: off, or to the same dtype."""
    then, now = runner.traced.autocast, autocast_dtype(runner.device_type)
    if now is not then:
        here, there = ("without autocast" if dtype is None else f"under autocast to {dtype}" for dtype in (now, then))
        hint = "compile and call in the same autocast state"
        raise InputMismatch(f"called {here}, the plan was made {there}", where="the call", hint=hint)


def _set_modes(modules: Sequence[nn.Module], modes: Sequence[bool]) -> None:
    for module, mode in zip(modules, modes, strict=True):
        module.training = mode
