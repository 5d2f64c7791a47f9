"""A copy of a model that is divided among ranks, as if it were on one: without torch's hooks, with whole parameters.

A parameter that tensor parallelism has placed stays a DTensor, with the whole of this rank's part.

The copy is for tracing. Its parameters are on the meta device where they are divided; all else is the model's own.
"""

from __future__ import annotations

import types
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from memplan.distributed.internals import placement_of, reading_torch
from memplan.distributed.local import placed_like
from memplan.distributed.parallelism import (
    Parallelism,
    fsdp_modules,
    fsdp_parameters,
    gathered_dtype,
    reducer_of,
)


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


_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Hooks on state dicts refer to torch's objects for sharded parameters, and are no part of a forward.
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


class _Inner(nn.Module):
    """Stands for a `DistributedDataParallel` in a copy: it calls its module, and no collective."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@reading_torch()
def whole_copy(model: nn.Module, parallelism: Parallelism) -> nn.Module:
    """Return the copy of a model. Names of parameters, buffers and modules are those of the model."""
    made: dict[int, Any] = {}  # by the identity of what it stands for
    for param in fsdp_parameters(model):
        whole = torch.empty(param._orig_size, dtype=gathered_dtype(param), device="meta")
        placement = placement_of(param)
        if placement is not None:
            whole = placed_like(whole, placement)
        made[id(param.sharded_param)] = nn.Parameter(whole, requires_grad=param.sharded_param.requires_grad)
    reducer = reducer_of(model)
    classes: dict[int, type[nn.Module]] = {}
    held: dict[int, dict[str, Any]] = {}
    for module in fsdp_modules(model):
        classes[id(module)], held[id(module)] = _plain_class(module), _without_hooks(module)
    if reducer is not None:
        classes[id(reducer)], held[id(reducer)] = _Inner, _of_inner(reducer)
    found = copy_structure(model, made, classes, held)
    for module in fsdp_modules(model):
        _cast(made[id(module)], module._get_fsdp_state()._mp_policy)  # type: ignore[operator]
    return found


def _of_inner(reducer: nn.Module) -> dict[str, Any]:
    """Return the attributes of what stands for a `DistributedDataParallel`."""
    found = vars(_Inner(nn.Module()))
    return {**found, "training": reducer.training, "_modules": {"module": reducer.module}}


def _plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before `fully_shard`."""
    from torch.distributed.fsdp import FSDPModule

    return next(c for c in type(module).__mro__ if not issubclass(c, FSDPModule) and issubclass(c, nn.Module))


def _without_hooks(module: nn.Module) -> dict[str, Any]:
    """Return the attributes of a module without the hooks and objects that `fully_shard` has registered."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY

    state = module._get_fsdp_state()  # type: ignore[operator]
    own = {state._pre_forward_hook_handle.id, state._post_forward_hook_handle.id}
    found = {key: held for key, held in vars(module).items() if key not in (REGISTRY_KEY, STATE_KEY)}
    for kind in _HOOKS:
        for name in (kind, f"{kind}_with_kwargs"):
            if name in found:
                found[name] = OrderedDict((k, v) for k, v in found[name].items() if k not in own)
    for kind in _STATE_HOOKS:
        found[kind] = OrderedDict()
    return found


def _cast(module: nn.Module, policy: Any) -> None:
    """Cast what a module takes and returns, as the mixed precision of its `fully_shard` does."""
    if policy.cast_forward_inputs and policy.param_dtype is not None:
        taken = policy.param_dtype

        def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
            return _casted(args, taken), _casted(kwargs, taken)

        module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
    if policy.output_dtype is not None:
        returned = policy.output_dtype

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            return _casted(output, returned)

        module.register_forward_hook(after)


def _casted(tree: Any, dtype: torch.dtype) -> Any:
    """Return a tree with its floating-point tensors in another type."""

    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.to(dtype) if x.is_floating_point() else x

    return pytree.tree_map_only(torch.Tensor, cast, tree)
