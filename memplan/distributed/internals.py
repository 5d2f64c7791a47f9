"""Checks that torch keeps what FSDP2 and `DistributedDataParallel` know where memplan reads it.

Neither says by public names how it gathers and reduces. The names that are read here are those of torch 2.11
to 2.14; where one of them is missing, a model is refused, instead of read halfway.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch

from memplan.errors import UnsupportedGraph
from memplan.torch_inside.versions import KNOWN

# the attributes that are read of each of torch's objects; `_modules` and the like, which every module has, apart
OF_STATE = (
    "_modules",
    "_mp_policy",
    "_auto_reshard_after_forward",
    "_pre_forward_hook_handle",
    "_post_forward_hook_handle",
)
OF_GROUP = (
    "mesh_info",
    "post_forward_mesh_info",
    "offload_policy",
    "fsdp_params",
    "reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "is_unsharded",
    "_all_gather_comm",
    "_reduce_scatter_comm",
    "_all_reduce_hook",
)
OF_PARAMETER = (
    "sharded_param",
    "sharded_size",
    "padded_sharded_param_size",
    "fsdp_placement",
    "is_dtensor",
    "mesh_info",
    "mp_policy",
    "_orig_size",
    "_sharded_local_tensor",
    "_module_info",
)
OF_REDUCER = (
    "process_group",
    "bucket_bytes_cap",
    "bucket_bytes_cap_default",
    "parameters_to_ignore",
    "require_backward_grad_sync",
    "mixed_precision",
    "will_sync_module_buffers",
    "_comm_hooks",
    "_delay_all_reduce_params",
    "_join_config",
)


def internal(module: str, name: str) -> Any:
    """Return a private object of torch by its module and name. Raises `UnsupportedGraph` if this torch has none."""
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        raise _elsewhere(module, name) from None


def require_attributes(thing: Any, names: tuple[str, ...]) -> None:
    """Raise `UnsupportedGraph` for the first of these attributes that one of torch's objects does not have."""
    missing = next((name for name in names if not hasattr(thing, name)), None)
    if missing is not None:
        raise _elsewhere(type(thing).__name__, missing)


def require_state(state: Any) -> None:
    """Raise `UnsupportedGraph` if the state of a module that `fully_shard` was called for is not as it is read."""
    require_attributes(state, OF_STATE)
    for group in groups_of(state):
        require_attributes(group, OF_GROUP)
        for param in group.fsdp_params:
            require_attributes(param, OF_PARAMETER)


def groups_of(state: Any) -> list[Any]:
    """Return the groups of parameters in the state of a module that `fully_shard` was called for.

    Raises `UnsupportedGraph` if this torch keeps them elsewhere.
    """
    if hasattr(state, "_fsdp_param_group"):  # torch 2.11: one, or none
        return [group for group in (state._fsdp_param_group,) if group is not None]
    require_attributes(state, ("_fsdp_param_groups",))
    return list(state._fsdp_param_groups)


def placement_of(param: Any) -> Any:
    """Return how the DTensor was placed that `fully_shard` has divided further; None for a plain tensor.

    Raises `UnsupportedGraph` if this torch keeps it elsewhere.
    """
    if not param.is_dtensor:
        return None
    if hasattr(param, "_tp_spec"):  # torch 2.11
        return param._tp_spec
    require_attributes(param, ("_unsharded_dtensor_spec",))
    return param._unsharded_dtensor_spec


def _elsewhere(where: str, name: str) -> UnsupportedGraph:
    what = f"has no {name!r} in torch {torch.__version__}, by which memplan reads how parameters are divided"
    hint = f"install torch {KNOWN[-1]}, or train without memplan"
    return UnsupportedGraph(where, what, hint, see="ranks-refused")
