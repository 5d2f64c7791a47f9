"""A copy of a model's modules, which shares all that they hold but modules, parameters and buffers.

What users keep on a model (locks, process groups, tensors that are no buffers) is neither copied nor looked into.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn


def copy_structure(
    model: nn.Module,
    made: dict[int, Any],
    classes: Mapping[int, type[nn.Module]] | None = None,
    held: Mapping[int, dict[str, Any]] | None = None,
) -> nn.Module:
    """Return a model of new modules, with the same names.

    Args:
        model: The model, which is not changed.
        made: What stands for tensors, by the identity of what it replaces. The new modules are added.
        classes: The classes of new modules that have another than theirs, by the identity of the module.
        held: The attributes of new modules that have others than theirs.
    """
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    for module in modules:
        made[id(module)] = object.__new__((classes or {}).get(id(module), type(module)))
    for module in modules:
        attributes = (held or {}).get(id(module), vars(module))
        made[id(module)].__dict__.update({key: _standing_in(x, made) for key, x in attributes.items()})
    found: nn.Module = made.get(id(model), model)
    return found


def _standing_in(value: Any, made: Mapping[int, Any]) -> Any:
    """Return a value with modules and parameters replaced by what was made for them; all else is the same object.

    It looks into plain lists, tuples and dicts, and binds methods of modules to their copies.
    """
    if id(value) in made:
        return made[id(value)]
    if isinstance(value, types.MethodType):
        return types.MethodType(value.__func__, made[id(value.__self__)]) if id(value.__self__) in made else value
    if type(value) in (dict, OrderedDict):
        return type(value)((key, _standing_in(x, made)) for key, x in value.items())
    if type(value) in (list, tuple):
        return type(value)(_standing_in(x, made) for x in value)
    return value
