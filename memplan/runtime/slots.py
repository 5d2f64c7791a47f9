"""Where a model keeps its submodules, parameters and buffers, so that a program notices when they moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from memplan.errors import InputMismatch
from memplan.trace.traced import Source, TracedGraph


class Structure:
    """The module tree of a model, checked on every call: which submodules it has, and their modes.

    `version` grows whenever a submodule was replaced, so that whoever looked something up looks again.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.version = 0
        self._look()

    def _look(self) -> None:
        self.modules = list(self.model.modules())
        self._links = [(m._modules, key) for m in self.modules for key in m._modules]
        self._children = [holder[key] for holder, key in self._links]

    def modes(self) -> list[bool]:
        """The training flag of every submodule, after a look at whether they are still the same ones."""
        if [holder.get(key) for holder, key in self._links] != self._children:
            self._look()
            self.version += 1
        return [m.training for m in self.modules]

    def name_of(self, index: int) -> str:
        """Qualified name of a submodule ("h.0.attn"), by its index in `modes()`."""
        return next(str(name) for name, m in self.model.named_modules() if m is self.modules[index])


class Slots:
    """The parameters and buffers of a traced step, looked up in the module on every call.

    A slot is a module's own dict and a key in it, so that replaced parameters are seen too.
    """

    def __init__(self, structure: Structure, traced: TracedGraph) -> None:
        self._structure = structure
        self.bindings = [i for i, b in enumerate(traced.bindings) if b.source in (Source.PARAMETER, Source.BUFFER)]
        self.names = [traced.bindings[i].name for i in self.bindings]
        self._look()
        self.pointers: list[int] = []
        self.flags: list[bool] = []
        tensors = self.tensors()
        self._layouts = [_layout(t) for t in tensors]
        self._ties = _ties(tensors)
        self.note(tensors)

    def _look(self) -> None:
        self._slots = [_slot(self._structure.model, name) for name in self.names]
        self._version = self._structure.version

    def tensors(self) -> list[torch.Tensor]:
        """The tensors as they are now, in the order of `bindings`."""
        if self._version != self._structure.version:
            self._look()
        return [holder[key] for holder, key in self._slots]

    def note(self, tensors: Sequence[torch.Tensor]) -> None:
        """Remember where these tensors live."""
        self.pointers = [t.data_ptr() for t in tensors]
        self.flags = [t.requires_grad for t in tensors]

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Positions whose tensor lives elsewhere than noted.

        Raises `InputMismatch` for a tensor that is not what was traced (shape, dtype, device, strides,
        requires_grad), and when tensors are no longer tied as they were.
        """
        moved = []
        for i, tensor in enumerate(tensors):
            if _layout(tensor) != self._layouts[i] or tensor.requires_grad != self.flags[i]:
                raise InputMismatch(
                    f"is {_describe(_layout(tensor), tensor.requires_grad)}, "
                    f"the plan was made for {_describe(self._layouts[i], self.flags[i])}",
                    where=self.names[i],
                    hint="compile the model again after changing it",
                )
            if tensor.data_ptr() != self.pointers[i]:
                moved.append(i)
        if _ties(tensors) != self._ties:
            raise InputMismatch(
                "parameters that shared their memory no longer do, or the other way round",
                where=self.names[moved[0]] if moved else None,
                hint="compile the model again after changing it",
            )
        return moved


def _slot(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    path, _, key = name.rpartition(".")
    owner = model.get_submodule(path)
    return (owner._parameters if key in owner._parameters else owner._buffers), key


def _layout(t: torch.Tensor) -> tuple[Any, ...]:
    return tuple(t.shape), t.stride(), t.dtype, t.device


def _describe(layout: tuple[Any, ...], requires_grad: bool) -> str:
    shape, strides, dtype, device = layout
    return f"{dtype} {shape} with strides {strides} on {device}, requires_grad={requires_grad}"


def _ties(tensors: Sequence[torch.Tensor]) -> list[int]:
    """For each tensor the position of the first that shares its memory."""
    first: dict[int, int] = {}
    return [first.setdefault(t.untyped_storage().data_ptr(), i) for i, t in enumerate(tensors)]
