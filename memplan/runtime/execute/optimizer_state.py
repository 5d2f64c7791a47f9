"""Finds the state of a model and its optimizer for a step, and holds the step's own state beside it."""

from __future__ import annotations

import weakref
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from memplan.distributed.local import Slot, of_this_rank
from memplan.distributed.step_ranks import ParallelGuards
from memplan.errors import InputMismatch, TornStep, UnsupportedCall
from memplan.runtime.guards.module_guards import COMPILE_AGAIN, ModuleGuards, hooks_ever_set, hooks_of_node
from memplan.trace.optimizer.optimizers import DECIDING, has_own_step
from memplan.trace.optimizer.updates import LEARNING_RATE
from memplan.trace.traced import Binding, Source

_OF_ALL_OPTIMIZERS = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
_SKIPPED = "has a hook, which a compiled step would not call"
_HOOKS = "remove it, or compile the model alone (memplan.compile) and keep the optimizer"
_LOAD_OR_COMPILE = "load a checkpoint of the optimizer, or compile the step again, which begins from zero"


class StepGuards(ModuleGuards):
    """The guards of a model and its optimizer: parameters, options and state, and hooks that a step would not call."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self._rates: dict[str, dict[str, Any]] = {}
        self._last_rates = [group.get("lr") for group in optimizer.param_groups]
        self._parallel = ParallelGuards(model)
        self._parallel.check()
        self._updating = False
        self._torn: list[tuple[str, weakref.ref[torch.Tensor], int]] = []
        super().__init__(model)
        self.called = getattr(model, "model", model)  # without its loss
        self.refresh()

    def refresh(self) -> None:
        """Take the model and the optimizer as they are now for what they should be."""
        self._options = list(map(_deciding, self.optimizer.param_groups))
        self._own_step = has_own_step(self.optimizer)
        self._look()
        self._store()
        own = {id(p) for group in self._groups for p in group}
        self._updated = [(name, p) for name, p in self.model.named_parameters() if id(p) in own]
        self._require_no_hooks()
        self.version += 1

    def tensors(self) -> list[torch.Tensor]:
        """Return what the model and the optimizer hold."""
        state = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, torch.Tensor))
        return [*super().tensors(), *state]

    def begin_update(self) -> None:
        """Note that a step begins to change parameters and state."""
        self._updating = True

    def end_update(self, *, whole: bool) -> None:
        """Note that a step has changed all of them, or has ended before, if it has begun to."""
        if self._updating and not whole:
            held = [(name, p, self.optimizer.state.get(p, {})) for name, p in self._updated]
            changed = [
                (name, t) for name, p, state in held for t in (p, *state.values()) if isinstance(t, torch.Tensor)
            ]
            self._torn = [(name, weakref.ref(t), t._version) for name, t in changed]
        self._updating = False

    def require_whole(self) -> None:
        """Raise `TornStep` while something is as a step left it that ended in the middle of its update."""
        if not self._torn:
            return
        now = {id(t) for t in self.tensors()}
        left = ((name, t, version) for name, of, version in self._torn if (t := of()) is not None and id(t) in now)
        self._torn = [(name, weakref.ref(t), version) for name, t, version in left if t._version == version]
        if self._torn:
            what = "the last step ended in the middle of its update: some parameters have their new values, others not"
            hint = "load what state_dict of the model and of the optimizer returned after a whole step"
            raise TornStep(what, where=self._torn[0][0], hint=hint)

    def look_again(self) -> None:
        """Look up the state again."""
        self._store()
        self.version += 1

    @property
    def update_key(self) -> str:
        """The facts that a fused update depends on: the parameters of each group, the options that decide, and whether
        `step` was replaced.
        """
        return str(([[id(p) for p in group] for group in self._groups], self._options, self._own_step))

    def _store(self) -> None:
        """Store the current parameters of each group, and the current state of all parameters."""
        groups = self.optimizer.param_groups
        self._groups = [list(group["params"]) for group in groups]
        self._parameters = list(self.optimizer.state)
        self._optimizer_states = list(self.optimizer.state.values())

    def modes(self) -> list[bool]:
        """Return the modes, after checking that the optimizer has the same parameters, options and state."""
        self._parallel.check()
        groups = self.optimizer.param_groups
        if len(groups) != len(self._groups) or not all(
            _same(group["params"], stored) for group, stored in zip(groups, self._groups, strict=True)
        ):
            what = "its groups do not have the parameters that they had when the step was compiled"
            raise InputMismatch(what, where="the optimizer", hint=COMPILE_AGAIN, see="other-model")
        if list(map(_deciding, groups)) != self._options:
            self._require_options()
        if has_own_step(self.optimizer) != self._own_step:
            what = "its step is not the function that it was when the step was compiled"
            raise InputMismatch(what, where="the optimizer", hint=COMPILE_AGAIN, see="other-model")
        state = self.optimizer.state
        if not (_same(state, self._parameters) and _same(state.values(), self._optimizer_states)):
            self._store()
            self.version += 1
        return super().modes()

    def require_known(self) -> None:
        """Raise `InputMismatch` if the optimizer has a parameter that is no longer in the model."""
        for name, p in self._updated:
            if self.model.get_parameter(name) is not p:
                what = "is not the parameter that the optimizer has"
                hint = "load without assign=True, or make the optimizer anew and compile the step again"
                raise InputMismatch(what, where=name, hint=hint, see="other-model")

    def _count_hooks(self) -> None:
        """Count module hooks; refuse hooks of the optimizer and its parameters, which a compiled step does not call."""
        if self._hooks_ever != hooks_ever_set():
            self._require_no_hooks()
        super()._count_hooks()

    def _require_no_hooks(self) -> None:
        """Raise `UnsupportedCall` for a hook that backward, or `optimizer.step()`, would call in eager."""
        own = self.optimizer
        hooks = (*_OF_ALL_OPTIMIZERS, own._optimizer_step_pre_hooks, own._optimizer_step_post_hooks)
        if any(hooks):
            raise UnsupportedCall(
                "has a hook on its step, which a compiled step would not call",
                where="optimizer",
                hint=_HOOKS,
                see="parameter-hooks",
            )
        for name, p in self.model.named_parameters():
            if p._backward_hooks or p._post_accumulate_grad_hooks or hooks_of_node(p):
                raise UnsupportedCall(_SKIPPED, where=name, hint=_HOOKS, see="parameter-hooks")

    def _require_options(self) -> None:
        """Raise `InputMismatch` if an option of a group has changed that decides how parameters are updated."""
        for i, (group, stored) in enumerate(zip(self.optimizer.param_groups, self._options, strict=True)):
            for option, now, before in zip((*DECIDING, "lr as a tensor"), _deciding(group), stored, strict=True):
                if now != before and not (option == "momentum" and now and before):
                    what = f"{option} changed from {before} to {now}"
                    raise InputMismatch(what, where=f"the optimizer's group {i}", hint=COMPILE_AGAIN, see="other-model")
        self._options = list(map(_deciding, self.optimizer.param_groups))

    def slot(self, binding: Binding) -> tuple[Slot, str]:
        """Return the dict and key of a binding; state that the step keeps itself is created on first use."""
        if binding.source is not Source.STATE:
            return super().slot(binding)
        holder, key = self._state_slot(binding)
        return of_this_rank(holder, key), key

    def _state_slot(self, binding: Binding) -> tuple[dict[str, Any], str]:
        if binding.key == LEARNING_RATE:
            return self._rates.setdefault(binding.name, self._new_rate(binding.name)), binding.key
        return self._state_of(binding.name, binding.key), binding.key

    def _state_of(self, name: str, key: str) -> dict[str, Any]:
        """Return the optimizer's state of a parameter. Raises `InputMismatch` if `key` is missing in it."""
        state: dict[str, Any] = self.optimizer.state.get(self.model.get_parameter(name), {})
        if key not in state:
            what = f"the optimizer's state has no {key!r} any more"
            raise InputMismatch(what, where=name, hint=_LOAD_OR_COMPILE, see="optimizer-state")
        return state

    def _new_rate(self, name: str) -> dict[str, Any]:
        group = self.optimizer.param_groups[int(name.rpartition(" ")[2])]
        return {LEARNING_RATE: torch.tensor(group["lr"], dtype=torch.float32, device=group["params"][0].device)}

    def synchronize(self) -> None:
        """Set the rates that a CUDA graph reads from memory to those of the optimizer, right before a program runs."""
        if not self._rates:
            return
        now = [group["lr"] for group in self.optimizer.param_groups]
        if now != self._last_rates:
            for name, rate in self._rates.items():
                rate[LEARNING_RATE].fill_(now[int(name.rpartition(" ")[2])])
            self._last_rates = now


def _deciding(group: dict[str, Any]) -> list[Any]:
    """Return the options of a group that decide how its parameters are updated."""
    return [*map(group.get, DECIDING), isinstance(group.get("lr"), torch.Tensor)]


def _same(ones: Any, others: Any) -> bool:
    """Return whether two collections hold the same objects in the same order."""
    return len(ones) == len(others) and all(map(is_, ones, others))
