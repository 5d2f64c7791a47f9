"""Refuse what of FSDP2 and `DistributedDataParallel` a compiled step cannot do as torch does, each in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import distributed, nn

from memplan.errors import UnsupportedGraph

_DDP = "DistributedDataParallel"


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
    if (type(group._all_gather_comm), type(group._reduce_scatter_comm)) != (DefaultAllGather, DefaultReduceScatter):
        _refuse(where, "has collectives of its own (set_custom_all_gather and the like)", "use torch's own")
    if group._all_reduce_hook is not None:
        _refuse(where, "has an all-reduce hook", "do what it does outside of the step")
    if any(_gathers(x) for x in vars(module).values()):
        what = "has a method that gathers its parameters (register_fsdp_forward_method)"
        _refuse(where, what, "leave that out: a compiled step gathers each parameter where it is read")
    if not group.reduce_grads:
        hint = "call set_requires_gradient_sync(True), and pass accumulate= to compile_step"
        _refuse(where, "does not reduce its gradients (set_requires_gradient_sync(False))", hint)
    if group.gradient_divide_factor is not None or group.force_sum_reduction_for_comms:
        _refuse(where, "has a divide factor of its own for its gradients", "scale the loss instead")


def _gathers(value: object) -> bool:
    """Return whether an attribute is what `register_fsdp_forward_method` has put in the place of a method."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    code = getattr(value, "__code__", None)
    return code is not None and code in register_fsdp_forward_method.__code__.co_consts


def require_parameter(param: Any) -> None:
    """Raise `UnsupportedGraph` for a parameter that is not divided by rows, or has a layout of its own."""
    where = param._param_fqn or param._module_info.param_name
    if getattr(param.mesh_info, "is_spmd_mesh", False):  # torch 2.11 has none
        what = "is a DTensor over all dimensions of the mesh (dp_mesh_dims)"
        _refuse(where, what, "place it on one dimension (mesh['tp']), and call fully_shard with mesh['dp']")
    if param.fsdp_placement.dim != 0:
        _refuse(where, f"is divided along dimension {param.fsdp_placement.dim}", "leave shard_placement_fn out")
    if hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather"):
        _refuse(where, "gathers itself in a form of its own (fsdp_pre_all_gather)", "use a plain parameter")


def require_placed(name: str, spec: Any) -> None:
    """Raise `UnsupportedGraph` for a DTensor that is not divided, or copied, over a mesh of one dimension."""
    if len(spec.placements) != 1:
        what = f"is a DTensor over a mesh of {len(spec.placements)} dimensions that fully_shard has not made"
        _refuse(name, what, "place it on one dimension of the mesh (mesh['tp'])")
    placement = spec.placements[0]
    if not placement.is_replicate() and type(placement).__name__ != "Shard":
        _refuse(name, f"is a DTensor that is placed as {placement}", "place it as Shard(...) or Replicate()")


def require_plain_buffers(names: Iterable[str]) -> None:
    """Raise `UnsupportedGraph` for the first of the names of buffers that are DTensors."""
    for name in names:
        what = "is a buffer that is divided or copied among ranks as a DTensor"
        _refuse(name, what, "keep buffers as plain tensors, and convert them in forward")


def require_one_mesh(groups: Mapping[str, str]) -> None:
    """Raise `UnsupportedGraph` unless all parameters (by name) are placed on the ranks of one process group."""
    first = next(iter(groups.values()), "")
    for name, group in groups.items():
        if group != first:
            what = "is placed on other ranks than the parameters before it"
            _refuse(name, what, "pass the same mesh to each parallelize_module")


def require_even(name: str, size: int, ranks: int) -> None:
    """Raise `UnsupportedGraph` unless all ranks have parts of one size of a parameter that is divided again.

    Ranks with smaller parts would gather and reduce other shapes than the ranks that they are compared with.
    """
    if size % ranks:
        what = f"is divided by fully_shard, and by tensor parallelism before, which divides {size} among {ranks} ranks"
        _refuse(name, what, f"make that size a multiple of {ranks}")


def require_alone(groups: Sequence[Sequence[int]], *, replicated: bool) -> None:
    """Raise `UnsupportedGraph` for tensor parallelism with DDP, or with FSDP2 on a part of all ranks.

    `groups`: the ranks that parameters are placed on, and those that `fully_shard` divides them among.
    """
    if replicated:
        what = "wraps a model of which parameters are DTensors (tensor parallelism)"
        _refuse(_DDP, what, "use fully_shard over the other dimension of the mesh")
    size = 1
    for ranks in groups:
        size *= len(ranks)
    if len(groups) > 1 and size != distributed.get_world_size():
        what = f"is divided among {size} ranks by fully_shard and tensor parallelism, and there are "
        _refuse("the model", f"{what}{distributed.get_world_size()}", "make one mesh of two dimensions of all ranks")


def require_reducer(model: nn.Module, reducer: Any) -> None:
    """Raise `UnsupportedGraph` for a `DistributedDataParallel` that a compiled step does not follow."""
    require_reducer_options(reducer)
    nested = [m for m in model.modules() if isinstance(m, nn.parallel.DistributedDataParallel) and m is not reducer]
    if nested:
        _refuse(_DDP, "contains another one", "wrap the whole model once")
    if any(hasattr(m, "unshard") for m in reducer.modules()):
        _refuse(_DDP, "contains modules that fully_shard divides", "use one of them alone")


def require_reducer_options(reducer: Any) -> None:
    """Raise `UnsupportedGraph` for options of a `DistributedDataParallel` that it may be given at any time."""
    if not reducer.require_backward_grad_sync:
        _refuse(_DDP, "is in no_sync()", "compile and call the step outside of it, with accumulate= for several")
    if reducer._comm_hooks:
        _refuse(_DDP, "has a communication hook, which changes what is reduced", "leave register_comm_hook out")
    if getattr(reducer, "buffer_hook", None) is not None:
        _refuse(_DDP, "has a communication hook for its buffers", "leave the hook out")
    if reducer.mixed_precision is not None:
        _refuse(_DDP, "has a mixed_precision of its own", "run the model under torch.autocast")
    if reducer._delay_all_reduce_params:
        _refuse(_DDP, "reduces some parameters later (delay_all_reduce_named_params)", "leave that out")
    if reducer._join_config.enable:
        what = "is in join(), where a rank without batches takes part in the reductions of the others"
        _refuse(_DDP, what, "give all ranks the same number of batches")


def require_one_group(groups: Mapping[str, Sequence[int]]) -> None:
    """Raise `UnsupportedGraph` unless all of a model is divided among the same ranks.

    `groups`: the ranks of each process group, by the name of a parameter that is divided among them.
    """
    (_, first), *others = groups.items()
    for name, ranks in others:
        if list(ranks) != list(first):
            what = f"is divided among the ranks {list(ranks)}, and others among {list(first)}"
            _refuse(name, what, "pass the same mesh to each fully_shard")
