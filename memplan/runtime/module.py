"""`CompiledModule`: what `memplan.compile` returns. Called, trained and saved like the model that it came from."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memplan.errors import InputMismatch, MemplanError
from memplan.graph import require_same
from memplan.plan import Plan
from memplan.planfile import load
from memplan.runtime.arena import Arena
from memplan.runtime.guards import GUARDS, redzone_of
from memplan.runtime.runner import Runner
from memplan.runtime.slots import Structure
from memplan.trace import alignment_of, plan_traced, trace

ON_MISMATCH = ("error", "eager", "replan")
_MAX_REPLANNED = 8


class CompiledModule(nn.Module):
    """A model that runs in one planned arena. Made by `memplan.compile`.

    It shares the parameters, buffers and submodules of the original under the same names: optimizers,
    `state_dict`, `.train()`, `.eval()` and hooks on parameters work on both alike. Calls under
    `torch.no_grad()` and in `eval()` mode run a forward-only plan, made at the first such call, in the same
    arena. `plan` is the plan that training (or, compiled with `train=False`, every call) runs.
    """

    plan: Plan

    def __init__(
        self,
        model: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        train: bool | None = None,
        plan: Plan | str | os.PathLike[str] | None = None,
        solver: Any = "auto",
        time_limit: float | None = None,
        in_place: bool = True,
        guard: str | None = None,
        on_mismatch: str = "error",
    ) -> None:
        super().__init__()
        _check_choice("guard", guard, (None, *GUARDS))
        _check_choice("on_mismatch", on_mismatch, ON_MISMATCH)
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_backward_hooks"):
            self.__dict__[name] = model.__dict__[name]
        self.training = model.training
        self.__dict__["_original"] = model
        self.__dict__["_structure"] = Structure(model)
        self.__dict__["_options"] = {"solver": solver, "time_limit": time_limit}
        self.__dict__["_in_place"] = in_place
        self.__dict__["_guard"] = guard
        self.__dict__["_on_mismatch"] = on_mismatch
        self.__dict__["_arena"] = None
        self.__dict__["_runners"] = {}
        given = load(plan) if isinstance(plan, (str, os.PathLike)) else plan
        main = self._build(args, kwargs, model.training if train is None else train, given)
        self.__dict__["_main"] = main
        self.__dict__["_grad"] = main.traced.training
        self.__dict__["_modes"] = self._structure.modes()
        self.__dict__["plan"] = main.plan

    # -- calling -----------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Raises `InputMismatch` or `StaleActivationsError` rather than be silently wrong."""
        training = self._grad and torch.is_grad_enabled()
        try:
            runner, leaves = self._select(args, kwargs, training)
        except InputMismatch:
            if self._on_mismatch == "error":
                raise
            if self._on_mismatch == "eager":
                return self._original(*args, **kwargs)
            runner, leaves = self._replan(args, kwargs, training)
        return runner(leaves, training=runner.traced.training)

    def _select(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> tuple[Runner, list[Any]]:
        """The runner for the current mode, and the leaves of the call as it takes them."""
        main: Runner = self._main
        leaves = main.signature.flatten(args, kwargs)
        modes = self._structure.modes()
        if modes == self._modes and training == self._grad:
            return main, leaves
        if any(modes) and modes != self._modes:
            pairs = zip(modes, self._modes, strict=False)
            i = next((i for i, (now, then) in enumerate(pairs) if now != then), 0)
            raise InputMismatch(
                f"training={modes[i]}, the plan was made for training={self._modes[i]}",
                where=self._structure.name_of(i) or "the model",
                hint="switch the whole model with .train() or .eval(), or compile again in this mode",
            )
        return self._runner_for(("inference", *modes), args, kwargs, train=False), leaves

    def _replan(self, args: tuple[Any, ...], kwargs: dict[str, Any], training: bool) -> tuple[Runner, list[Any]]:
        import torch.utils._pytree as pytree

        flat, spec = pytree.tree_flatten((args, kwargs))
        shapes = tuple((x.shape, x.dtype, x.device) if isinstance(x, torch.Tensor) else x for x in flat)
        modes = tuple(self._structure.modes())
        runner = self._runner_for(("replan", training, str(spec), shapes, modes), args, kwargs, train=training)
        return runner, runner.signature.flatten(args, kwargs)

    def _runner_for(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, train: bool) -> Runner:
        runners: dict[Any, Runner] = self._runners
        if key not in runners:
            if len(runners) >= _MAX_REPLANNED:
                del runners[next(iter(runners))]
            runners[key] = self._build(args, kwargs, train, None)
        return runners[key]

    # -- building ----------------------------------------------------------------------------------------

    def _build(self, args: tuple[Any, ...], kwargs: dict[str, Any], train: bool, given: Plan | None) -> Runner:
        """Trace, plan and build; everything that can be refused is refused before the arena is allocated."""
        traced = trace(self._original, args, kwargs, train=train, in_place=self._in_place)
        redzone = redzone_of(self._guard, alignment_of(traced.device))
        if given is None:
            plan = plan_traced(traced, redzone=redzone, **self._options)
        else:
            require_same(given.graph, traced.graph)
            if given.redzone < redzone:
                hint = "pass no plan, or no guard"
                raise InputMismatch(
                    "the given plan has no red zones around its buffers", where="guard='redzone'", hint=hint
                )
            plan = given
        arena = self._arena_for(plan, traced.device)
        return Runner(self._structure, traced, plan, arena, guard=self._guard)

    def _arena_for(self, plan: Plan, device: torch.device) -> Arena:
        """The module's arena if the plan fits in it (programs take turns), else one of its own."""
        if self._arena is None:
            self.__dict__["_arena"] = Arena(plan.arena_size, device)
        arena: Arena = self._arena
        return arena if plan.arena_size <= arena.nbytes else Arena(plan.arena_size, device)

    # -- being the model ---------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> CompiledModule:
        """Set the mode of the original too: both share everything."""
        self._original.train(mode)
        self.training = mode
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)


def _check_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    if value not in choices:
        raise MemplanError(f"{name}={value!r}", hint=f"choose one of: {', '.join(map(repr, choices))}")


def compile(
    model: nn.Module,
    example_inputs: Any = (),
    example_kwargs: dict[str, Any] | None = None,
    *,
    train: bool | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    solver: Any = "auto",
    time_limit: float | None = None,
    in_place: bool = True,
    guard: str | None = None,
    on_mismatch: str = "error",
) -> CompiledModule:
    """Compile `model` to run forward and backward at planned addresses in one preallocated arena.

    `example_inputs` is the tuple of positional arguments (or the only one), `example_kwargs` the others: real
    tensors, with the shapes, dtypes and devices of every later call. `train`: plan forward and backward
    (None: as `model.training` says) or the forward alone. `plan`: a saved plan (or its path) to run instead
    of making one; it must have been made for this very graph. `in_place`: let results take the
    bytes of inputs that die there, where the kernel allows it. `guard`: "poison" or "redzone" checks every
    step (slowly). `on_mismatch`: a call that differs from the example raises ("error"), runs the original
    model ("eager"), or gets a plan of its own ("replan").

    Raises `UnsupportedGraph` before anything is allocated when the model cannot be traced as one graph,
    `PlanMismatch` when `plan` was made for another graph, and what `memplan.load` raises.
    """
    args = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    return CompiledModule(
        model,
        args,
        example_kwargs or {},
        train=train,
        plan=plan,
        solver=solver,
        time_limit=time_limit,
        in_place=in_place,
        guard=guard,
        on_mismatch=on_mismatch,
    )
