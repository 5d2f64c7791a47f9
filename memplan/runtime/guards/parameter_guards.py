"""Checks on every call where the parameters, buffers and optimizer state of a traced step are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import getitem, is_
from typing import Any

import numpy as np
import torch

from memplan.distributed.local import LocalTensors
from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import layout_check, same_constant
from memplan.runtime.guards.module_guards import COMPILE_AGAIN, ModuleGuards
from memplan.trace.capture.python_values import GONE, Reading
from memplan.trace.traced import Binding, Source, TracedGraph

_OF_MODEL = (Source.PARAMETER, Source.BUFFER)
_HELD = (*_OF_MODEL, Source.STATE)
_data_ptr = torch.Tensor.data_ptr


class ParameterGuards:
    """The parameters, buffers and state of a traced step, looked up in the module on every call.

    A slot is a dict of a module and a key in it, so that replaced parameters are found too. `distributed`: some tensors
    are this rank's parts of DTensors.
    """

    def __init__(self, module_guards: ModuleGuards, traced: TracedGraph) -> None:
        self._module_guards = module_guards
        self.bindings = [i for i, b in enumerate(traced.bindings) if b.source in _HELD]
        self._held = [traced.bindings[i] for i in self.bindings]
        self.names = [f"{b.name} ({b.key})" if b.key else b.name for b in self._held]
        self._look()
        tensors = self.tensors()
        self._devices = [t.device for t in tensors]
        self._ties = _ties(tensors)
        self._free = all(first == i for i, (first, _) in enumerate(self._ties))  # no two share memory
        state = self._state(tensors)
        self._require_as_traced(state, traced)
        self._store(tensors, state)
        expected = [_as_traced(b, s, traced) for b, s in zip(self._held, state, strict=True)]
        if expected != state:  # it was traced when others were frozen or laid out otherwise, not for the model of now
            self._expected, self._same_layout = expected, _never

    def _look(self) -> None:
        slots = [self._module_guards.slot(b) for b in self._held]
        self._holders, self._keys = [holder for holder, _ in slots], [key for _, key in slots]
        self._version = self._module_guards.version
        self.distributed = any(isinstance(holder, LocalTensors) for holder in self._holders)

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors, in the order of `bindings`."""
        if self._version != self._module_guards.version:
            self._look()
        return list(map(getitem, self._holders, self._keys))

    def attached(self, positions: Sequence[int]) -> list[torch.Tensor]:
        """Return some of the current tensors as autograd knows them; parts of DTensors are connected to these."""
        found = [(self._holders[i], self._keys[i]) for i in positions]
        return [h.attached(key) if isinstance(h, LocalTensors) else h[key] for h, key in found]

    def look(self) -> tuple[list[torch.Tensor], bool]:
        """Return the current tensors, and whether all are certain to have the stored address and layout.

        If not, `moved` compares them one by one.
        """
        tensors = self.tensors()
        return tensors, self._same_layout(*tensors) and list(map(_data_ptr, tensors)) == self._pointers

    def _store(self, tensors: Sequence[torch.Tensor], state: list[tuple[Any, ...]]) -> None:
        self._expected = state
        self._pointers = [pointer for pointer, *_ in state]
        self._same_layout = layout_check(tensors)

    def _require_as_traced(self, state: Sequence[tuple[Any, ...]], traced: TracedGraph) -> None:
        """Raise `InputMismatch` if a parameter or buffer has another shape or type than when it was traced.

        A program that is assembled again (in a larger arena, for another shape) may meet a model that has changed.
        """
        for binding, name, (_, shape, _, dtype, _) in zip(self._held, self.names, state, strict=True):
            value = traced.graph.values[binding.value]
            if binding.source in _OF_MODEL and (tuple(shape), str(dtype)) != (value.shape, f"torch.{value.dtype}"):
                what = f"is {dtype} {tuple(shape)}, the plan was made for torch.{value.dtype} {value.shape}"
                raise InputMismatch(what, where=name, hint=COMPILE_AGAIN, see="other-model")

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
        for i, (now, then) in enumerate(zip(state, self._expected, strict=True)):
            if now[1:] != then[1:] or tensors[i].device != self._devices[i]:
                what = (
                    f"is {_describe(now, tensors[i].device)}, the plan was made for {_describe(then, self._devices[i])}"
                )
                raise InputMismatch(what, where=self.names[i], hint=COMPILE_AGAIN, see="other-model")
        moved = [i for i, (now, then) in enumerate(zip(state, self._expected, strict=True)) if now[0] != then[0]]
        if _ties(tensors) != self._ties and not (self._free and _apart(tensors)):
            what = "parameters do not share memory as they did when the model was compiled"
            raise InputMismatch(
                what, where=self.names[moved[0]] if moved else None, hint=COMPILE_AGAIN, see="other-model"
            )
        self._module_guards.require_known()
        self._store(tensors, state)
        return moved


def _as_traced(binding: Binding, state: tuple[Any, ...], traced: TracedGraph) -> tuple[Any, ...]:
    """Return the state of a tensor as it has to be: of a parameter or buffer, with the strides of its trace."""
    if binding.source not in _OF_MODEL:
        return state
    pointer, shape, strides, dtype, _ = state
    value = traced.graph.values[binding.value]
    places = zip(shape, strides, value.strides, strict=True)
    if 0 not in shape and any(now != then for n, now, then in places if n > 1):
        strides = value.strides
    return pointer, shape, strides, dtype, binding.requires_grad


def _never(*_: torch.Tensor) -> bool:
    """Return False: the tensors are compared one by one."""
    return False


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
    """Return whether no byte belongs to two of the tensors."""
    spans = sorted((t.data_ptr(), t.data_ptr() + _span(t)) for t in tensors if t.numel())
    return all(one[1] <= two[0] for one, two in pairwise(spans))


def _span(t: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last."""
    last = sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True))
    return int(last + 1) * t.element_size()


_OF_MODULES = ("_modules", "_parameters", "_buffers")  # dicts that are never replaced; `ModuleGuards` checks submodules
_HINT = f"{COMPILE_AGAIN}; a registered buffer, changed in place, may have another value in each step"


class PythonValueGuards:
    """Compares the `readings` of a traced step with the current values."""

    def __init__(self, module_guards: ModuleGuards, readings: Sequence[Reading]) -> None:
        self._module_guards = module_guards
        self._readings = readings
        self._version: int | None = None  # nothing is stored yet

    def require_same(self) -> None:
        """Raise `InputMismatch` naming the first value that has changed."""
        try:
            if (
                self._version == self._module_guards.version
                and all(map(is_, map(getitem, self._holders, self._keys), self._items))
                and (not self._attributes or all(map(is_, map(getattr, self._owners, self._names), self._attributes)))
                and list(map(len, self._sized)) == self._lengths
            ):
                return
        except (LookupError, AttributeError, ValueError):  # one is gone: the comparison below names it
            pass
        for reading in self._readings:
            now = reading.now(self._module_guards.model)
            if not _same_value(now, reading.value):
                what = f"is {_shown(now)}, the plan was made for {_shown(reading.value)}"
                raise InputMismatch(what, where=_words(reading), hint=_HINT)
        self._look()

    def _look(self) -> None:
        """Store where each value is, and every object on the path to it except submodules."""
        items: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        attributes: dict[tuple[int, Any], tuple[Any, Any, Any]] = {}
        self._sized: list[Any] = []
        for reading in self._readings:
            owner: Any = self._module_guards.model if reading.root is None else reading.root
            structure = len(reading.path) - len(reading.beyond_modules())
            for i, link in enumerate(reading.path):
                value = link.of(owner)
                if i >= structure and not (link.attribute and link.key in _OF_MODULES):
                    held = owner if not link.attribute else getattr(owner, "__dict__", {})
                    plain = not link.attribute or link.key in held
                    kept, place = (items, held) if plain else (attributes, owner)
                    kept[id(place), link.key] = place, link.key, value
                owner = value
            if reading.length and not isinstance(owner, tuple):
                self._sized.append(owner)
        self._lengths = list(map(len, self._sized))
        self._holders, self._keys, self._items = map(list, zip(*items.values(), strict=True)) if items else ([], [], [])
        found = map(list, zip(*attributes.values(), strict=True)) if attributes else ([], [], [])
        self._owners, self._names, self._attributes = found
        self._version = self._module_guards.version


def _same_value(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is not type(before) or isinstance(now, torch.Tensor):
        return False
    if isinstance(now, tuple):
        return len(now) == len(before) and all(map(_same_value, now, before))
    return repr(now) == repr(before) if isinstance(now, np.generic) else same_constant(now, before)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)} (object {id(value):#x})"
    return "gone" if value is GONE else repr(value)


def _words(reading: Reading) -> str:
    """Return a reading as the user would write it: "drop.p", "config.scale", "loss_fn.__defaults__[0]"."""
    words = "" if reading.root is None else getattr(reading.root, "__name__", "what forward reads from outside")
    submodule = False
    for link in reading.path:
        if link.attribute and link.key in _OF_MODULES:
            submodule = True
            continue
        words += f".{link.key}" if link.attribute or submodule else f"[{link.key!r}]"
        submodule = False
    return ("the length of " if reading.length else "") + words.lstrip(".")
