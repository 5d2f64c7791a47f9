"""Checks whether the Python values that `forward` reads (dropout rates, temperatures) are those that were traced.

Each call compares the identities of all of them, in two passes over lists that run in C; values are compared only if an
identity differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import getitem, is_
from typing import Any

import numpy as np
import torch

from memplan.errors import InputMismatch
from memplan.runtime.guards.input_guards import same_constant
from memplan.runtime.guards.module_guards import COMPILE_AGAIN, ModuleGuards
from memplan.trace.capture.python_values import GONE, Reading

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
                what = f"is {_describe(now)}, the plan was made for {_describe(reading.value)}"
                raise InputMismatch(what, where=_name(reading), hint=_HINT)
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


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype} {tuple(value.shape)} (object {id(value):#x})"
    return "gone" if value is GONE else repr(value)


def _name(reading: Reading) -> str:
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
