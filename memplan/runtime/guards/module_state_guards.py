"""Where a model keeps its submodules, parameters and buffers, so that a program notices when they moved."""

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
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)  # which call or hand over what they have, few or many
COMPILE_AGAIN = "compile the model again after changing it (or once, by memplan.compile with on_mismatch='replan')"
_training = attrgetter("training")
_data_ptr = torch.Tensor.data_ptr


class Structure:
    """The module tree of a model, checked on every call: which submodules it has, and their modes.

    `version` grows whenever a submodule was replaced, so that whoever looked something up looks again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.called = model  # what takes the arguments of a call
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
        self._dicts = [*growing, *self._states]  # whose sizes tell of what is new in them
        self._sizes = list(map(len, self._dicts))
        self._plain = all("training" in state for state in self._states)  # no property, as a compiled module's is

    def modes(self) -> list[bool]:
        """The training flag of every submodule, after a look at whether they are still the same ones.

        Raises `InputMismatch` when a submodule was replaced by one of another type, or hooks came or went.
        """
        if list(map(dict.get, self._holders, self._keys)) != self._children:
            self._look_again()
        if list(map(len, self._dicts)) != self._sizes:
            self._look_at_new()
        if self._hook_count or self._hooks_ever != hooks_ever_set():
            self._count_hooks()
        if self._plain:
            return list(map(getitem, self._states, repeat("training")))
        return list(map(_training, self.modules))

    def _look_at_new(self) -> None:
        """Modules have got or lost submodules, or attributes, of which a forward matters.

        Raises `InputMismatch` for a submodule that has been given a forward of its own, or has lost it.
        """
        if sum(len(m._modules) for m in self.modules) != len(self._children):
            self._look_again()
        for i, (state, patched) in enumerate(zip(self._states, self._patched, strict=True)):
            if ("forward" in state) is not patched:
                where = self.name_of(i) or "the model"
                raise InputMismatch("its forward is another function", where=where, hint=COMPILE_AGAIN)
        self._sizes = list(map(len, self._dicts))

    def _count_hooks(self) -> None:
        ever = hooks_ever_set()
        if sum(map(len, self._hooks)) != self._hook_count:
            raise InputMismatch("module hooks were added or removed", where="the model", hint=COMPILE_AGAIN)
        self._hooks_ever = ever

    def _look_again(self) -> None:
        types, before = _types(self.model), self._types
        if list(types.items()) != list(before.items()):  # and nothing is noted: the next call raises, too
            names = {**before, **types}
            name = next((name for name in names if before.get(name) is not types.get(name)), "")
            was, now = (found[name].__name__ if name in found else "nothing" for found in (before, types))
            what = f"was {was}, is {now}" if was != now else "submodules are in another order"
            raise InputMismatch(what, where=name or "the model", hint=COMPILE_AGAIN)
        count = self._hook_count
        self._look()
        self._hook_count, self._hooks_ever = count, -1  # to be counted again
        self.version += 1

    def require_modes(self, modes: list[bool]) -> None:
        """Raise `InputMismatch` naming the first submodule whose training flag is not that of `modes`."""
        now = self.modes()
        if now != modes:
            i = next(i for i, (one, two) in enumerate(zip(now, modes, strict=True)) if one != two)
            raise InputMismatch(
                f"training={now[i]}, the plan was made for training={modes[i]}",
                where=self.name_of(i) or "the model",
                hint="switch the whole model with .train() or .eval(), or compile again in this mode",
            )

    def require_known(self) -> None:
        """Called when parameters moved; raises `InputMismatch` where something else still has the old ones."""

    def slot(self, binding: Binding) -> tuple[dict[str, Any], str]:
        """The dict and the key under which the model keeps a parameter or buffer."""
        path, _, key = binding.name.rpartition(".")
        owner = self.model.get_submodule(path)
        return (owner._parameters if key in owner._parameters else owner._buffers), key

    def name_of(self, index: int) -> str:
        """Qualified name of a submodule ("h.0.attn"), by its index in `modes()`."""
        return next(str(name) for name, m in self.model.named_modules() if m is self.modules[index])


class ModuleStateGuards:
    """The parameters and buffers of a traced step, looked up in the module on every call.

    A slot is a module's own dict and a key in it, so that replaced parameters are seen too.
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
        self._free = all(first == i for i, (first, _) in enumerate(self._ties))  # each in memory of its own
        self._note(tensors, self._state(tensors))

    def _look(self) -> None:
        slots = [self._structure.slot(b) for b in self._held]
        self._holders, self._keys = [holder for holder, _ in slots], [key for _, key in slots]
        self._version = self._structure.version

    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now, in the order of `bindings`."""
        if self._version != self._structure.version:
            self._look()
        return list(map(getitem, self._holders, self._keys))

    def look(self) -> tuple[list[torch.Tensor], bool]:
        """As `tensors`, and whether each lies where it was noted and is what it was; False: `moved` knows."""
        tensors = self.tensors()
        return tensors, self._alike(*tensors) and list(map(_data_ptr, tensors)) == self._pointers

    def _note(self, tensors: Sequence[torch.Tensor], state: list[tuple[Any, ...]]) -> None:
        self._noted = state
        self._pointers = [pointer for pointer, *_ in state]
        self._alike = LayoutGuards(tensors).check

    def _state(self, tensors: Sequence[torch.Tensor]) -> list[tuple[Any, ...]]:
        """Where each tensor lives, and how it is laid out. Raises `InputMismatch` for one that is gone."""
        try:
            return [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.requires_grad) for t in tensors]
        except AttributeError as error:
            name = next(name for name, t in zip(self.names, tensors, strict=True) if t is None)
            raise InputMismatch("is None, the plan was made for a tensor", where=name, hint=COMPILE_AGAIN) from error

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions whose tensor lives elsewhere than noted; notes where they live now.

        Raises `InputMismatch` for a tensor that is not what was traced (shape, dtype, device, strides,
        requires_grad), and when tensors are no longer tied as they were (parts of one memory, as
        `vector_to_parameters` makes them, are tied only where they overlap).
        """
        state = self._state(tensors)
        for i, (now, then) in enumerate(zip(state, self._noted, strict=True)):
            if now[1:] != then[1:] or tensors[i].device != self._devices[i]:
                what = (
                    f"is {_describe(now, tensors[i].device)}, the plan was made for {_describe(then, self._devices[i])}"
                )
                raise InputMismatch(what, where=self.names[i], hint=COMPILE_AGAIN)
        moved = [i for i, (now, then) in enumerate(zip(state, self._noted, strict=True)) if now[0] != then[0]]
        if _ties(tensors) != self._ties and not (self._free and _apart(tensors)):
            what = "parameters that shared their memory no longer do, or the other way round"
            raise InputMismatch(what, where=self.names[moved[0]] if moved else None, hint=COMPILE_AGAIN)
        self._structure.require_known()
        self._note(tensors, state)
        return moved


def _types(model: nn.Module) -> dict[str, type[nn.Module]]:
    return {name: type(m) for name, m in model.named_modules()}


def _describe(state: tuple[Any, ...], device: torch.device) -> str:
    _, shape, strides, dtype, requires_grad = state
    return f"{dtype} {tuple(shape)} with strides {strides} on {device}, requires_grad={requires_grad}"


def _ties(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int]]:
    """For each tensor the position of the first that shares its memory, and how far behind that it starts.

    Tensors without memory (freed, as FSDP does between steps, or empty) share none.
    """
    first: dict[int, int] = {}
    found = []
    for i, t in enumerate(tensors):
        j = first.setdefault(t.untyped_storage().data_ptr() or -1 - i, i)
        found.append((j, t.data_ptr() - tensors[j].data_ptr()))
    return found


def _apart(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no byte belongs to two of them."""
    spans = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors if t.numel())
    return all(one[1] <= two[0] for one, two in pairwise(spans))


def _span(t: torch.Tensor) -> int:
    """Bytes from a tensor's first element to the end of its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return int(last + 1) * t.element_size()
