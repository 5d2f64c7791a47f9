"""Refuse what of FSDP2 and `DistributedDataParallel` a compiled step cannot do as torch does, each in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from memplan.errors import UnsupportedGraph


def _refuse(where: str, what: str, hint: str) -> None:
    raise UnsupportedGraph(where, what, hint, see="ranks-refused")


def require_group(module: nn.Module, state: Any, group: Any) -> None:
    """Raise `UnsupportedGraph` for options of a `fully_shard` that a compiled step does not follow."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

    where = type(module).__name__
    if isinstance(group.mesh_info, HSDPMeshInfo) or not isinstance(group.mesh_info, FSDPMeshInfo):
        _refuse(where, "is sharded over a mesh of several dimensions (HSDP)", "shard it over a mesh of one dimension")
    if len(state._modules) > 1:
        _refuse(where, "is one of several modules of a fully_shard([...])", "call fully_shard for each of them")
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        _refuse(where, "is sharded with an offload_policy", "leave offloading to memplan: pass budget=")
    if type(group._all_gather_comm) is not DefaultAllGather or type(group._reduce_scatter_comm) not in (
        DefaultReduceScatter,
    ):
        _refuse(where, "has collectives of its own (set_custom_all_gather and the like)", "use torch's own")
    if group._all_reduce_hook is not None:
        _refuse(where, "has an all-reduce hook", "do what it does outside of the step")
    if not group.reduce_grads:
        hint = "call set_requires_gradient_sync(True), and pass accumulate= to compile_step"
        _refuse(where, "does not reduce its gradients (set_requires_gradient_sync(False))", hint)
    if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
        _refuse(where, "has a divide factor of its own for its gradients", "scale the loss instead")


def require_parameter(param: Any) -> None:
    """Raise `UnsupportedGraph` for a parameter that is not divided by rows, or has a layout of its own."""
    where = param._param_fqn or param._module_info.param_name
    if param.is_dtensor:
        what = "is a DTensor already that fully_shard divides again (tensor parallelism with FSDP)"
        _refuse(where, what, "use one of them alone")
    if param.fsdp_placement.dim != 0:
        _refuse(where, f"is divided along dimension {param.fsdp_placement.dim}", "leave shard_placement_fn out")
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        _refuse(where, "gathers itself in a form of its own (fsdp_pre_all_gather)", "use a plain parameter")


def require_known(others: Iterable[str]) -> None:
    """Raise `UnsupportedGraph` for a DTensor that `fully_shard` has not made; `others` are the names of such."""
    for name in others:
        what = "is a DTensor that fully_shard has not made (tensor parallelism), which cannot be planned yet"
        _refuse(name, what, "use fully_shard alone, or train without memplan")


def require_reducer(model: nn.Module, reducer: Any) -> None:
    """Raise `UnsupportedGraph` for options of a `DistributedDataParallel` that a compiled step does not follow."""
    where = "DistributedDataParallel"
    if reducer._comm_hooks:
        _refuse(where, "has a communication hook, which changes what is reduced", "leave register_comm_hook out")
    if reducer.mixed_precision is not None:
        _refuse(where, "has a mixed_precision of its own", "run the model under torch.autocast")
    if reducer._delay_all_reduce_params:
        _refuse(where, "reduces some parameters later (delay_all_reduce_named_params)", "leave that out")
    if not reducer.require_backward_grad_sync:
        _refuse(where, "is in no_sync()", "compile and call the step outside of it, with accumulate= for several")
    nested = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel) and m is not reducer]
    if nested:
        _refuse(where, "contains another one", "wrap the whole model once")
    if any(hasattr(m, "unshard") for m in reducer.modules()):
        _refuse(where, "contains modules that fully_shard divides", "use one of them alone")
