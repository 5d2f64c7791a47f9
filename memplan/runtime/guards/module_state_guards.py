"""Checks on every call which submodules, parameters and buffers a model has, and where they are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, repeat
from operator import attrgetter, contains, getitem
from typing import Any

import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.runtime.guards.hook_counts import hooks_ever_set
from memplan.runtime.guards.layout_guards import LayoutGuards
from memplan.trace.traced import Binding, Source, TracedGraph

_HELD = (Source.PARAMETER, Source.BUFFER, Source.STATE)
_CONTAINERS = (
    nn.Sequential,
    nn.ModuleList,
    nn.ModuleDict,
)  # their forward or caller uses however many submodules they have
COMPILE_AGAIN = "compile the model again after changing it (or once, by memplan.compile with on_mismatch='replan')"
_training = attrgetter("training")
_data_ptr = torch.Tensor.data_ptr


class Structure:
    """The module tree of a model, checked on every call: its submodules and their training flags.

    `version` increases whenever a submodule was replaced: what was looked up before must be looked up again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called = model  # the module that takes the arguments of a call
        self.version = 0
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
        growing = [m._modules for m in self.modules if m._modules or isinstance(m, _CONTAINERS)]
        self._dicts = [*growing, *self._states]  # their sizes change if anything is added or removed
        self._sizes = list(map(len, self._dicts))
        self._plain = all(
            "training" in state for state in self._states
        )  # not so in a compiled module, where it is a property

    def modes(self) -> list[bool]:
        """Return the training flag of every submodule, after checking that the submodules are the same.

        Raises `InputMismatch` if a submodule was replaced by one of another type, or hooks were added or removed.
        """
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
                    "its forward is another function", where=where, hint=COMPILE_AGAIN, see="other-model"
                )
        self._sizes = list(map(len, self._dicts))

    def _count_hooks(self) -> None:
        ever = hooks_ever_set()
        if sum(map(len, self._hooks)) != self._hook_count:
            raise InputMismatch(
                "module hooks were added or removed", where="the model", hint=COMPILE_AGAIN, see="other-model"
            )
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

    def slot(self, binding: Binding) -> tuple[dict[str, Any], str]:
        """Return the dict and the key under which the model keeps a parameter or buffer."""
        path, _, key = binding.name.rpartition(".")
        owner = self.model.get_submodule(path)
        return (owner._parameters if key in owner._parameters else owner._buffers), key

    def name_of(self, index: int) -> str:
        """Return the qualified name of a submodule ("h.0.attn"), by its index in `modes()`."""
        return next(str(name) for name, m in self.model.named_modules() if m is self.modules[index])


class ModuleStateGuards:
    """The parameters, buffers and state of a traced step, looked up in the module on every call.

    A slot is a dict of a module and a key in it, so that replaced parameters are found too.
    """

    def __init__(self, structure: Structure, traced: TracedGraph) -> None:
        self._structure = structure
        self.bindings = [i for i, b in enumerate(traced.bindings) if b.source in _HELD]
        self._held = [traced.bindings[i] for i in self.bindings]
        self.names = [f"{b.name} ({b.key})" if b.key else b.name for b in self._held]
        self._look()
        tensors = self.tensors()
        self._devices = [t.device for t in tensors]
        self._ties = _ties(tensors)
        self._free = all(first == i for i, (first, _) in enumerate(self._ties))  # no two share memory
        self._note(tensors, self._state(tensors))

    def _look(self) -> None:
        slots = [self._structure.slot(b) for b in self._held]
        self._holders, self._keys = [holder for holder, _ in slots], [key for _, key in slots]
        self._version = self._structure.version

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors, in the order of `bindings`."""
        if self._version != self._structure.version:
            self._look()
        return list(map(getitem, self._holders, self._keys))

    def look(self) -> tuple[list[torch.Tensor], bool]:
        """Return the current tensors, and whether all are certain to have the stored address and layout.

        If not, `moved` compares them one by one.
        """
        tensors = self.tensors()
        return tensors, self._same_layout(*tensors) and list(map(_data_ptr, tensors)) == self._pointers

    def _note(self, tensors: Sequence[torch.Tensor], state: list[tuple[Any, ...]]) -> None:
        self._noted = state
        self._pointers = [pointer for pointer, *_ in state]
        self._same_layout = LayoutGuards(tensors).check

    def _state(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        """Return the address and layout of each tensor. Raises `InputMismatch` for one that is None."""
        try:
            return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]
        except AttributeError as error:
            name = next(name for name, t in zip(self.names, tensors, strict=True) if t is None)
            raise InputMismatch(
                "is None, the plan was made for a tensor", where=name, hint=COMPILE_AGAIN, see="other-model"
            ) from error

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Return the positions of tensors whose address differs from the stored one, and store the current addresses.

        Raises `InputMismatch` for a tensor that differs from the traced one (shape, dtype, device, strides,
        requires_grad), and if tensors do not share memory as they did. Parts of one storage that do not overlap, as
        `vector_to_parameters` makes them, do not count as shared.
        """
        state = self._state(tensors)
        for i, (now, then) in enumerate(zip(state, self._noted, strict=True)):
            if now[1:] != then[1:] or tensors[i].device != self._devices[i]:
                what = (
                    f"is {_describe(now, tensors[i].device)}, the plan was made for {_describe(then, self._devices[i])}"
                )
                raise InputMismatch(what, where=self.names[i], hint=COMPILE_AGAIN, see="other-model")
        moved = [i for i, (now, then) in enumerate(zip(state, self._noted, strict=True)) if now[0] != then[0]]
        if _ties(tensors) != self._ties and not (self._free and _apart(tensors)):
            what = "parameters that shared their memory no longer do, or the other way round"
            raise InputMismatch(
                what, where=self.names[moved[0]] if moved else None, hint=COMPILE_AGAIN, see="other-model"
            )
        self._structure.require_known()
        self._note(tensors, state)
        return moved


def _types(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules()}


def _describe(state: tuple[Any, ...], device: torch.device) -> str:
    _, shape, strides, dtype, requires_grad = state
    return f"{dtype} {tuple(shape)} with strides {strides} on {device}, requires_grad={requires_grad}"


def _ties(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """Return for each tensor the position of the first that shares its memory, and its distance from that in bytes.

    Tensors without memory (empty, or freed, as FSDP does between steps) share none.
    """
    first: dict[int, int] = {}
    found = []
    for i, t in enumerate(tensors):
        j = first.setdefault(t.untyped_storage().data_ptr() or -1 - i, i)
        found.append((j, t.data_ptr() - tensors[j].data_ptr()))
    return found


def _apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no byte belongs to two of the tensors."""
    spans = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors if t.numel())
    return all(one[1] <= two[0] for one, two in pairwise(spans))


def _span(t: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return int(last + 1) * t.element_size()
