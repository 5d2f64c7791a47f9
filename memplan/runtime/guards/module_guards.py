"""Checks on every call that a model has the submodules, hooks and training flags that it was compiled with."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import repeat
from operator import attrgetter, contains, getitem, is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.utils.hooks import RemovableHandle

from memplan.distributed.local import Slot, of_this_rank
from memplan.errors import InputMismatch
from memplan.trace.traced import Binding

_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
)  # their forward or caller uses however many submodules they have
COMPILE_AGAIN = "compile the model again after changing it (or once, by memplan.compile with on_mismatch='replan')"
HOOKS_INSIDE = (
    f"{COMPILE_AGAIN}; tools that look at a model by hooks (summaries, counters of operations) take the original model"
)
_GLOBAL_HOOKS = ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks")
_ONLY_OUTSIDE = (
    "%s: hooks on all modules (register_module_forward_hook and the like) are called for the compiled module as a "
    "whole, and not for the modules inside; call the original model for those"
)
_training = attrgetter("training")
_log = logging.getLogger("memplan")


class ModuleGuards:
    """The module tree of a model, checked on every call: its submodules and their training flags.

    `version` increases whenever a submodule was replaced: what was looked up before must be looked up again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called = model  # the module that takes the arguments of a call
        self.version = 0
        self._warned = False
        self._look()

    def _look(self) -> None:
        self.modules = list(self.model.modules())
        owners = [m._modules for m in self.modules]
        links = [(owner, key) for owner in owners for key in owner]
        self._holders, self._keys = [holder for holder, _ in links], [key for _, key in links]
        self._children = list(map(getitem, self._holders, self._keys))
        self._types = _types(self.model)
        kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        self._hooks = [getattr(m, kind) for m in self.modules for kind in kinds]
        self._hook_count = sum(map(len, self._hooks))
        self._hooks_ever = hooks_ever_set()
        self._states = [m.__dict__ for m in self.modules]
        self._patched = list(map(contains, self._states, repeat("forward")))
        parents = [m for m in self.modules if m._modules or isinstance(m, _CONTAINERS)]
        self._parents = [m.__dict__ for m in parents]
        self._tables = [m._modules for m in parents]  # `del sequential[i]` replaces the dict
        self._dicts = [*self._tables, *self._states]  # their sizes change if anything is added or removed
        self._sizes = list(map(len, self._dicts))
        self._plain = all(
            "training" in state for state in self._states
        )  # not so in a compiled module, where it is a property

    def tensors(self) -> list[torch.Tensor]:
        """Return what the model holds: parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    def modes(self) -> list[bool]:
        """Return the training flag of every submodule, after checking that the submodules are the same.

        Raises `InputMismatch` if a submodule was replaced by one of another type, or hooks were added or removed.
        """
        if not all(map(is_, map(getitem, self._parents, repeat("_modules")), self._tables)):
            self._refresh_submodules()
        if list(map(dict.get, self._holders, self._keys)) != self._children:
            self._refresh_submodules()
        if list(map(len, self._dicts)) != self._sizes:
            self._check_sizes()
        if self._hook_count or self._hooks_ever != hooks_ever_set():
            self._count_hooks()
        if self._plain:
            return list(map(getitem, self._states, repeat("training")))
        return list(map(_training, self.modules))

    def _check_sizes(self) -> None:
        """Look for submodules and `forward` attributes that were added or removed.

        Raises `InputMismatch` if `forward` was set on a submodule, or removed from it.
        """
        if sum(len(m._modules) for m in self.modules) != len(self._children):
            self._refresh_submodules()
        for i, (state, patched) in enumerate(zip(self._states, self._patched, strict=True)):
            if ("forward" in state) is not patched:
                where = self.name_of(i) or "the model"
                raise InputMismatch(
                    "its forward was replaced by another function", where=where, hint=COMPILE_AGAIN, see="other-model"
                )
        self._sizes = list(map(len, self._dicts))

    def _count_hooks(self) -> None:
        ever = hooks_ever_set()
        if sum(map(len, self._hooks)) != self._hook_count:
            raise InputMismatch(
                "module hooks were added or removed", where="the model", hint=HOOKS_INSIDE, see="other-model"
            )
        if not self._warned and any(getattr(torch_module, name) for name in _GLOBAL_HOOKS):
            self._warned = True
            _log.warning(_ONLY_OUTSIDE, type(self.model).__name__)
        self._hooks_ever = ever

    def _refresh_submodules(self) -> None:
        types, before = _types(self.model), self._types
        if list(types.items()) != list(before.items()):  # nothing is stored, so that the next call raises too
            names = {**before, **types}
            name = next((name for name in names if before.get(name) is not types.get(name)), "")
            was, now = (found[name].__name__ if name in found else "nothing" for found in (before, types))
            what = f"was {was}, is {now}" if was != now else "submodules are in another order"
            raise InputMismatch(what, where=name or "the model", hint=COMPILE_AGAIN, see="other-model")
        count = self._hook_count
        self._look()
        self._hook_count, self._hooks_ever = count, -1  # -1: they are counted again
        self.version += 1

    def require_modes(self, modes: list[bool]) -> None:
        """Raise `InputMismatch` naming the first submodule whose training flag differs from `modes`."""
        now = self.modes()
        if now != modes:
            i = next(i for i, (one, two) in enumerate(zip(now, modes, strict=True)) if one != two)
            raise InputMismatch(
                f"training={now[i]}, the plan was made for training={modes[i]}",
                where=self.name_of(i) or "the model",
                hint="switch the whole model with .train() or .eval(), or compile again in this mode",
            )

    def require_known(self) -> None:
        """Raise `InputMismatch` if something else still has the old parameters; called after parameters moved."""

    def slot(self, binding: Binding) -> tuple[Slot, str]:
        """Return the dict and the key under which the model keeps a parameter or buffer."""
        path, _, key = binding.name.rpartition(".")
        owner = self.model.get_submodule(path)
        return of_this_rank(owner._parameters if key in owner._parameters else owner._buffers, key), key

    def name_of(self, index: int) -> str:
        """Return the qualified name of a submodule ("h.0.attn"), by its index in `modes()`."""
        return next(str(name) for name, m in self.model.named_modules() if m is self.modules[index])


def _types(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules()}


class _Ours:
    """The number of hooks that memplan itself has added in this process to count others."""

    count = 0


def hooks_ever_set() -> int:
    """Return how many hooks others have added so far, on any object: while the number is the same, none was added."""
    return RemovableHandle.next_id - _Ours.count


def hooks_of_node(parameter: torch.Tensor) -> int:
    """Return how many hooks the node has that accumulates the gradient of a parameter."""
    if not parameter.requires_grad:
        return 0
    with torch.inference_mode(False), torch.enable_grad():  # otherwise there is no node
        return hooks_on(torch.autograd.graph.get_gradient_edge(parameter).node)


def hooks_on(node: Any) -> int:
    """Return how many hooks a node of autograd has."""
    count = 0
    for register in (node.register_hook, node.register_prehook):
        _Ours.count += 1  # before torch counts it: no other thread may see a number that real hooks reach later
        probe = register(_nothing)
        count += len(probe.hooks_dict_ref() or ()) - 1
        probe.remove()
    return count


class HookSearch:
    """Searches parameters for hooks that autograd would call; quick where none was set since it last found none."""

    def __init__(self) -> None:
        self._without: tuple[int, list[int]] = (-1, [])  # the hooks ever set, and the parameters, when none was found

    def first(self, parameters: Sequence[torch.Tensor]) -> int | None:
        """Return the position of the first parameter with a hook, on itself or on its node; None if there is none."""
        # if an id is reused by another tensor, its hook was set later
        now = (hooks_ever_set(), list(map(id, parameters)))
        for i, p in enumerate(parameters):
            if p._backward_hooks or p._post_accumulate_grad_hooks or (now != self._without and hooks_of_node(p)):
                return i
        self._without = now
        return None


def _nothing(*_: object) -> None:
    """Does nothing; it is never called."""
