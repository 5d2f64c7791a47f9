"""Find the Python values that forward reads beside tensors.

They are attributes, options, globals, and closures of a loss function, and are constants of a trace. Dynamo guards its
own code on them and names each (`L['self']._modules['drop'].p`). A compiled step checks under the same names whether
they still have the values of the trace.
"""

from __future__ import annotations

import ast
import enum
import inspect
import os
import sysconfig
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

_KINDS = ("CONSTANT_MATCH", "EQUALS_MATCH", "CLOSURE_MATCH", "BUILTIN_MATCH", "ID_MATCH", "TENSOR_MATCH")
_FOLLOWED = ("_parameters", "_buffers")  # their tensors are looked up in each call
_FROM_NUMPY = "___from_numpy("
_LENGTH = "SEQUENCE_LENGTH"
_CODE = (FunctionType, BuiltinFunctionType)
_PLAIN = (bool, int, float, complex, np.generic, str, enum.Enum, torch.dtype, torch.device, *_CODE)
_INSTALLED = tuple(sysconfig.get_path(kind) + os.sep for kind in ("stdlib", "platstdlib", "purelib", "platlib"))
GONE = object()


@dataclass(frozen=True, slots=True)
class PathStep:
    """One step of a path: an attribute or an item."""

    key: Any
    attribute: bool

    def of(self, owner: Any) -> Any:
        """Return the object that this step leads to from `owner`."""
        return getattr(owner, self.key) if self.attribute else owner[self.key]


_SUBMODULES, _TRAINING = PathStep("_modules", attribute=True), PathStep("training", attribute=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A Python value that a trace read: the `value` at the end of a path from `root` (None: the model itself), or its
    length.
    """

    root: Any
    path: tuple[PathStep, ...]
    length: bool = False
    value: Any = None

    def beyond_modules(self) -> tuple[PathStep, ...]:
        """Return the path without its way through the model's tree of modules."""
        i = 0
        while self.root is None and self.path[i : i + 1] == (_SUBMODULES,):
            i += 2
        return self.path[i:]

    def now(self, model: nn.Module) -> Any:
        """Return the current value; `GONE` if the path no longer leads anywhere."""
        found: Any = model if self.root is None else self.root
        try:
            for link in self.path:
                found = link.of(found)
            return len(found) if self.length else found
        except (AttributeError, LookupError, TypeError):
            return GONE


def readings_of(guards: Iterable[tuple[str, str]], known: dict[str, Any], forward: FunctionType) -> list[Reading]:
    """Return the readings of those of dynamo's guards (kind, name) that are about plain values, each once."""
    found: dict[tuple[str, bool], Reading] = {}
    for kind, said in guards:
        name = said.removeprefix(_FROM_NUMPY).removesuffix(")") if said.startswith(_FROM_NUMPY) else said
        if kind not in _KINDS and kind != _LENGTH:
            continue
        reading = _parsed(name, known, forward, length=kind == _LENGTH)
        if reading is not None:
            found.setdefault((name, reading.length), reading)
    return [found[key] for key in sorted(found)]


def _parsed(name: str, known: dict[str, Any], forward: FunctionType, *, length: bool) -> Reading | None:
    """Parse a guard's name as a path from the model or from a module of the user's; return None for other names."""
    node: Any
    try:
        node = ast.parse(name, mode="eval").body
    except SyntaxError:
        return None
    path: list[PathStep] = []
    while not _is_root(node):
        if isinstance(node, ast.Attribute):
            path.insert(0, PathStep(node.attr, attribute=True))
            node = node.value
        elif not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)):
            return None
        else:  # an item, or `dict(type(owner).__dict__)['key']`: what a class has for its objects
            of_class = isinstance(node.value, ast.Call)
            path.insert(0, PathStep(node.slice.value, attribute=of_class))
            node = _object_of_class(node.value) if of_class else node.value
            if node is None or (of_class and len(path) > 1):
                return None
    first = node.slice.value if isinstance(node.slice, ast.Constant) else None
    if node.value.id == "L":
        code = forward.__code__
        if first in code.co_freevars:  # the class is defined in a function
            cell = (forward.__closure__ or ())[code.co_freevars.index(first)]
            return Reading(root=cell, path=(PathStep("cell_contents", attribute=True), *path), length=length)
        whole = code.co_argcount == 0 and code.co_flags & inspect.CO_VARARGS  # a wrapper's `*args`
        if whole and path and first == code.co_varnames[code.co_kwonlyargcount] and path.pop(0).key != 0:
            return None
        ours = path and first in (code.co_varnames[0], code.co_varnames[code.co_kwonlyargcount] if whole else None)
        return Reading(root=None, path=tuple(path), length=length) if ours else None
    root = known.get(first) if isinstance(first, str) else None
    if isinstance(root, ModuleType) and path:
        return None if _is_installed(vars(root)) else Reading(root=root, path=tuple(path), length=length)
    if root is None or str(first).startswith("__") or _is_installed(known):  # such as `__builtins_dict___0`
        return None
    return Reading(root=known, path=(PathStep(first, attribute=False), *path), length=length)


def _is_installed(module: Mapping[str, Any]) -> bool:
    """Return whether these are the globals of a library, such as torch: its functions and tables do not change."""
    file = module.get("__file__")
    return (file is None and module.get("__name__") != "__main__") or str(file).startswith(_INSTALLED)


def _is_root(node: Any) -> bool:
    """Return whether a node is `L['self']`, `G['module']` or the like."""
    return isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)


def _object_of_class(call: Any) -> ast.expr | None:
    """Return the owner in `dict(type(owner).__dict__)` or `dict(type(owner).__mro__[1].__dict__)`; None for other
    calls.
    """
    node: Any = call.args[0] if len(call.args) == 1 else call
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "type":
        return node.args[0]
    return None


def with_values(readings: Iterable[Reading], model: nn.Module) -> tuple[Reading, ...]:
    """Return the readings with their current values, without those whose values cannot be compared."""
    current = (replace(reading, value=reading.now(model)) for reading in readings)
    found = (
        reading for reading in current if reading.beyond_modules() != (_TRAINING,)
    )  # module modes have a guard of their own
    kept = (reading for reading in found if _is_plain(reading.value) or _is_constant_tensor(reading))
    return tuple(reading for reading in kept if not _is_computed(reading, model))


def _is_plain(value: Any) -> bool:
    """Return whether a value can be compared: a number, a string, a function, or a tuple of these."""
    return value is None or isinstance(value, _PLAIN) or (type(value) is tuple and all(map(_is_plain, value)))


def _is_computed(reading: Reading, model: nn.Module) -> bool:
    """Return whether a reading is a property, which may return another object each time."""
    owner = replace(reading, path=reading.path[:-1]).now(model)
    return isinstance(getattr(type(owner), str(reading.path[-1].key), None), property)


def _is_constant_tensor(reading: Reading) -> bool:
    """Return whether a reading is a tensor that the trace holds: neither a parameter nor a buffer of the model."""
    rest = reading.beyond_modules()
    followed = reading.root is None and rest and rest[0].attribute and rest[0].key in _FOLLOWED
    return isinstance(reading.value, torch.Tensor) and not followed
