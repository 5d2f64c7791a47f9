"""Which program a call runs: one for each state (modes, gradients) in which the module is called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import InputMismatch
from memplan.runtime.builder import Builder
from memplan.runtime.runner import Runner
from memplan.trace.capture import autocast_dtype

_MAX_RUNNERS = 8


@dataclass(frozen=True, slots=True)
class State:
    """In which state a call is made: does autograd record, and the training flag of every submodule."""

    grad: bool
    modes: tuple[bool, ...]


class Selector:
    """Finds the runner for a call, or has one built for a state that comes up for the first time.

    `main` runs calls in the state in which the module was compiled. Under `no_grad` and in eval mode, others
    take its arena in turns.
    """

    def __init__(self, builder: Builder, main: Runner) -> None:
        self._builder, self._structure = builder, builder.structure
        self.main = main
        self.main_modes = self._structure.modes()
        self._runners: dict[Any, Runner] = {}

    @property
    def pool_bytes(self) -> int:
        """Bytes that the CUDA graphs of all its programs keep, each in a private pool."""
        return sum(runner.pool_bytes for runner in (self.main, *self._runners.values()))

    def select(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """The runner for the current state, and the leaves of the call as it takes them.

        Raises `InputMismatch` naming the first difference from what the module was compiled for.
        """
        main = self.main
        modes = self._structure.modes()
        grad = main.traced.training and torch.is_grad_enabled()
        require_autocast(main)
        runner = main
        if modes != self.main_modes or grad is not main.traced.training:
            self._check_modes(modes)
            leaves = main.signature.flatten(args, kwargs)
            example = pytree.tree_unflatten(leaves, main.signature.spec)
            runner = self._cached(State(grad, tuple(modes)), *example, train=grad)
        return runner, runner.signature.flatten(args, kwargs, training=grad)

    def replan(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Runner, list[Any]]:
        """The runner for a call that differs from the example: planned on its own, kept for the next like it."""
        flat, spec = pytree.tree_flatten((args, kwargs))
        layouts = tuple(
            (x.shape, x.stride(), x.dtype, x.device, x.requires_grad) if isinstance(x, torch.Tensor) else repr(x)
            for x in flat
        )
        grad = self.main.traced.training and torch.is_grad_enabled()
        autocast = autocast_dtype(self.main.device_type)
        state = State(grad, tuple(self._structure.modes()))
        runner = self._cached((state, autocast, str(spec), layouts), args, kwargs, train=grad)
        return runner, runner.signature.flatten(args, kwargs)

    def _cached(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Runner:
        if key not in self._runners:
            if len(self._runners) >= _MAX_RUNNERS:
                del self._runners[next(iter(self._runners))]
            self._runners[key] = self._builder.build(args, kwargs, train)
        return self._runners[key]

    def _check_modes(self, modes: list[bool]) -> None:
        """All modes as compiled, or the whole module in eval mode; anything between is likely a mistake."""
        if any(modes):
            self._structure.require_modes(self.main_modes)


def require_autocast(runner: Runner) -> None:
    """Raise `InputMismatch` unless autocast is as where the runner was traced: off, or to the same type."""
    then, now = runner.traced.autocast, autocast_dtype(runner.device_type)
    if now is not then:
        here, there = ("without autocast" if dtype is None else f"under autocast to {dtype}" for dtype in (now, then))
        hint = "compile and call in the same autocast state"
        raise InputMismatch(f"called {here}, the plan was made {there}", where="the call", hint=hint)
