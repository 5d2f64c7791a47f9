"""Selects the program that a call runs: one for each state (modes, gradients) in which the module is called."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.errors import InputMismatch, MemplanError, UnsupportedGraph
from memplan.runtime.api.builder import Builder
from memplan.runtime.execute.runner import Runner
from memplan.runtime.guards.input_guards import kind_of_call
from memplan.runtime.memory.arena import Arena
from memplan.trace.capture.joint_graph import NoBackward, autocast_dtype

MAX_PROGRAMS = 8  # of a module: the one of the example, and those of other calls
_log = logging.getLogger("memplan")
Example = tuple[tuple[Any, ...], dict[str, Any]]
_MAX_REFUSED = 64  # calls of which it is known that they cannot be planned


@dataclass(frozen=True, slots=True)
class CallState:
    """The state in which a call is made: whether autograd records it, and the training flag of every submodule."""

    grad: bool
    modes: tuple[bool, ...]


class TooManyPrograms(Exception):
    """Raised for a call that differs from the example if there are programs for as many other calls as are kept."""


class RunsEagerly(Exception):
    """Raised for a call that autograd records if no program with a backward is available: the original runs it."""


class Selector:
    """Finds the runner for a call; a state that is new gets a new runner.

    `main` runs calls in the state in which the module was compiled. Calls under `no_grad` and in eval mode run other
    runners in the same arena. `backward_on_demand`: if `main` has no backward, a call that eager would record gets a
    program that has one; if that cannot be planned, or its backward has not run yet, calls run eagerly (`RunsEagerly`).
    """

    def __init__(self, builder: Builder, main: Runner, *, backward_on_demand: bool = False) -> None:
        self.builder, self._module_guards = builder, builder.guards
        self.main = main
        self._backward_on_demand = backward_on_demand and not main.traced.training
        self._refused: dict[Any, MemplanError] = {}  # why a call has no program, so that it is traced once
        self.main_modes = self._module_guards.modes()
        self._main_modules = self._module_guards.modules
        self._runners: dict[Any, Runner] = {}

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
        return sum(runner.pool_bytes for runner in (self.main, *self._runners.values()))

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
            example = pytree.tree_unflatten(leaves, main.input_guards.spec)
            runner = self._cached(CallState(grad, tuple(modes)), *example, train=grad)
            self._require_free(runner.arena)
            return runner, runner.input_guards.flatten(args, kwargs, training=grad)
        self._require_free(main.arena)
        return main, main.input_guards.flatten(args, kwargs, training=grad)

    def replan(self, args: tuple[Any, ...], kwargs: dict[str, Any], reason: InputMismatch) -> tuple[Runner, list[Any]]:
        """Return the runner, kept for reuse, for a call that differs from the example; it has a plan of its own.

        Raises `TooManyPrograms` for a new one if there are `MAX_PROGRAMS`. `reason`: how the call differs, for the log.
        """
        grad = self._records(args, kwargs)
        autocast = autocast_dtype(self.main.device_type)
        state = CallState(grad, tuple(self._module_guards.modes()))
        key = (state, autocast, kind_of_call(args, kwargs))
        if key not in self._runners:
            if 1 + len(self._runners) >= MAX_PROGRAMS:
                raise TooManyPrograms
            _log.info(
                "%s: makes program %d of %d, for another call: %s",
                *(self.main.plan.model, 2 + len(self._runners), MAX_PROGRAMS, reason.summary),
            )
        runner = self._cached(key, args, kwargs, train=grad)
        self._require_free(runner.arena)
        return runner, runner.input_guards.flatten(args, kwargs)

    def _cached(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Runner:
        made = self._runners.get(key)
        if made is None:
            made = self._built(key, args, kwargs, train=train)
            if 1 + len(self._runners) >= MAX_PROGRAMS:
                del self._runners[next(iter(self._runners))]
            self._runners[key] = made
        return made

    @property
    def programs_of_calls(self) -> tuple[Runner, ...]:
        """Its programs, that of the example first."""
        return (self.main, *self._runners.values())

    def _records(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether a call goes through autograd."""
        if not torch.is_grad_enabled():
            return False
        if not self._backward_on_demand and (self.main.has_parameters or not self.main.traced.training):
            return self.main.traced.training
        given = chain(self.main.parameter_guards.tensors(), pytree.tree_leaves((args, kwargs)))
        return any(isinstance(x, torch.Tensor) and x.requires_grad for x in given)

    def _built(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Runner:
        """Return a new program; it has a backward if eager would record the call and something requires a gradient.

        What cannot be planned is remembered by the `key` of the call.
        """
        self._require_free(self.builder.arena)  # the trial run overwrites its bytes
        on_demand = self._backward_on_demand and train
        if key not in self._refused:
            try:
                return self.builder.build(args, kwargs, train)[0]
            except InputMismatch:
                raise
            except MemplanError as error:
                if on_demand and isinstance(error, NoBackward):
                    return self.builder.build(args, kwargs, train=False)[0]
                if not on_demand and not isinstance(error, UnsupportedGraph):
                    raise
                if len(self._refused) >= _MAX_REFUSED:
                    del self._refused[next(iter(self._refused))]
                self._refused[key] = copy.copy(error)  # without the frames of its traceback
                if not on_demand:
                    raise
        refused = copy.copy(self._refused[key])
        if on_demand:
            raise RunsEagerly(f"it cannot be planned with its backward ({refused})")
        raise refused

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
