"""Reads what `fully_shard`, `parallelize_module` and `DistributedDataParallel` have made of a model into plain values.

Nothing of torch's objects is changed, and none of their hooks is called: a compiled step does what they say by
collectives of its own. What it cannot do is refused (`refusals.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from memplan.distributed.agreement import Agreement
from memplan.distributed.internals import groups_of, placement_of, reading_torch
from memplan.distributed.local import PlacedParameter, group_of_all, is_distributed, placed_parameters
from memplan.distributed.ops import process_group
from memplan.distributed.refusals import (
    require_alone,
    require_group,
    require_one_group,
    require_parameter,
    require_reducer,
)
from memplan.torch_inside.versions import reducing_group

_FIRST_BUCKET_BYTES = 1 << 20  # of torch's, which starts to reduce early


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """A parameter that `fully_shard` has divided by rows (dimension 0) among the ranks of a group.

    `shape` and `dtype` are those of the whole parameter; `local` is the shape of this rank's part, `rows` the number of
    rows of the largest part, to which all are padded. The parameter is gathered as `gathered`, and its gradient is
    reduced as `reduced` by `how` ("avg" or "sum"), after dividing by `before` and before dividing by `after`.
    `reshards`: torch frees the whole parameter after the forward and gathers it again in the backward
    (`reshard_after_forward`). `group` names the process group of the gathers, `reduces` that of the reductions: another
    one of the same ranks if torch was told so (`set_separate_reduce_scatter_group`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    local: tuple[int, ...]
    rows: int
    ranks: int
    group: str
    reduces: str
    gathered: torch.dtype
    reduced: torch.dtype
    how: str
    before: float | None
    after: float | None
    reshards: bool

    @property
    def uneven(self) -> bool:
        """Whether the parts of some ranks are smaller than others."""
        return self.rows * self.ranks != self.shape[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Replicas:
    """A model of which each rank has a copy: gradients of `parameters` are averaged, in buckets of so many bytes.

    `buffers`: the names of buffers that the first rank's are copied to before each forward.
    """

    parameters: frozenset[str]
    buffers: frozenset[str]
    ranks: int
    group: str
    bucket_bytes: int
    first_bucket_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The division of the parameters of a model among ranks, or their copies on each of them.

    `shards` are by the name of the parameter, each name of tied ones, and so are those that are `placed` by tensor
    parallelism (some of them both: `fully_shard` divides a rank's part again). `replicas` is None for a model without
    `DistributedDataParallel`. `device` is that of the parameters. `group` is the name of the process group of all ranks
    that train the model together.
    """

    shards: Mapping[str, Shard]
    placed: Mapping[str, PlacedParameter]
    replicas: Replicas | None
    device: torch.device
    group: str

    @property
    def divides(self) -> bool:
        """Whether ranks have other parts of some parameters than others."""
        return bool(self.shards or self.placed)

    @property
    def lines(self) -> list[str]:
        """The way in which each parameter is gathered and reduced, a line each, which all ranks must have alike."""
        groups = list(dict.fromkeys(group for s in self.shards.values() for group in (s.group, s.reduces)))
        found = [
            f"parameter {name}: group {groups.index(s.group)}, gathered as {s.gathered}, reduced as {s.reduced} "
            f"by {s.how} in group {groups.index(s.reduces)}, divided by {s.before} before and {s.after} after"
            for name, s in self.shards.items()
        ]
        found += [one.line for one in self.placed.values()]
        if self.replicas is not None:
            found += [f"copied parameter {name}" for name in sorted(self.replicas.parameters)]
            found.append(f"buckets of {self.replicas.bucket_bytes} bytes, {self.replicas.first_bucket_bytes} at first")
        return found


@reading_torch()
def parallelism_of(model: nn.Module) -> Parallelism | None:
    """Return how a model is divided among ranks; None for a plain one.

    Whole parameters that an eager forward has left in the model are freed, as its next backward would free them.
    Raises `UnsupportedGraph` for what a compiled step cannot do as torch does.
    """
    if not distributed.is_available() or not distributed.is_initialized():
        return None
    for module in fsdp_modules(model):
        module.reshard()  # type: ignore[operator]
    names = dict(_names(model))
    sharded = fsdp_parameters(model)
    freed = _freed_after_forward(model)
    shards = {name: shard for param in sharded for name, shard in _shards(param, names, reshards=id(param) in freed)}
    placed = placed_parameters(model, dict(_inner(sharded, names)))
    replicas = _replicas(model)
    if not shards and not placed and replicas is None:
        return None
    groups = [next(iter({one.group: None for one in some})) for some in (shards.values(), placed.values()) if some]
    ranks = [distributed.get_process_group_ranks(process_group(name)) for name in groups]
    if shards:
        require_one_group(
            {one.name: distributed.get_process_group_ranks(process_group(one.group)) for one in shards.values()}
        )
    if placed:
        require_alone(ranks, replicated=replicas is not None)
    device = torch.device(sharded[0].device) if sharded else next(model.parameters()).device
    group = replicas.group if replicas is not None else groups[0] if len(groups) == 1 else group_of_all()
    return Parallelism(shards=shards, placed=placed, replicas=replicas, device=device, group=group)


def agreed_parallelism_of(model: nn.Module) -> Parallelism | None:
    """Return how a model is divided, as `parallelism_of`; if it raises, the other ranks of the model raise too."""
    try:
        return parallelism_of(model)
    except Exception:
        with Agreement(_group_unchecked(model)):
            raise


@reading_torch()
def _group_unchecked(model: nn.Module) -> str | None:
    """Return the name of the process group of all ranks that train a model together, which may be one to refuse."""
    reducer = reducer_of(model)
    if reducer is not None:
        return str(reducer.process_group.group_name)
    groups = [group for module in fsdp_modules(model) for group in groups_of(module._get_fsdp_state())]  # type: ignore[operator]
    meshes = [group.mesh_info for group in groups if hasattr(group.mesh_info, "shard_process_group")]
    placed: Any = next((p for p in model.parameters() if is_distributed(p)), None)
    if any(param.is_dtensor for group in groups for param in group.fsdp_params):
        return group_of_all()
    if meshes:
        return str(meshes[0].shard_process_group.group_name)
    if placed is None:
        return None
    return str(placed.device_mesh.get_group().group_name) if placed.device_mesh.ndim == 1 else group_of_all()


def fsdp_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that `fully_shard` was called for."""
    if not distributed.is_available():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def fsdp_parameters(model: nn.Module) -> list[Any]:
    """Return torch's `FSDPParam` of each sharded parameter, after checking that a compiled step can do what it says."""
    found = []
    for module in fsdp_modules(model):
        state = module._get_fsdp_state()  # type: ignore[operator]
        for group in groups_of(state):
            require_group(module, state, group)
            for param in group.fsdp_params:
                require_parameter(param)
            found += group.fsdp_params
    return found


def gathered_dtype(param: Any) -> torch.dtype:
    """Return the type in which the model reads a parameter, given torch's `FSDPParam` of it."""
    found: torch.dtype = param.mp_policy.param_dtype or param.sharded_param.dtype
    return found


def reducer_of(model: nn.Module) -> nn.parallel.DistributedDataParallel | None:
    """Return the `DistributedDataParallel` of a model: the model itself, or what its loss is computed from."""
    for module in (model, getattr(model, "model", None)):
        if isinstance(module, nn.parallel.DistributedDataParallel):
            return module
    return None


def _names(model: nn.Module) -> Iterator[tuple[int, list[str]]]:
    """Yield the identity of each parameter with all its names."""
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    yield from found.items()


def _inner(params: list[Any], names: Mapping[int, list[str]]) -> Iterator[tuple[str, tuple[Any, torch.Size] | None]]:
    """Yield each name of the parameters that `fully_shard` has divided, and how they were placed before (None: not)."""
    for param in params:
        spec = placement_of(param)
        for name in names[id(param.sharded_param)]:
            yield name, None if spec is None else (spec, param._orig_size)


def _freed_after_forward(model: nn.Module) -> set[int]:
    """Return the identities of the `FSDPParam`s whose whole parameters torch frees after the forward.

    Where `fully_shard` was not told, it keeps those of an outermost module, which the backward needs at once.
    """
    modules = fsdp_modules(model)
    inner = {m for outer in modules for m in outer.modules() if m is not outer}
    found: set[int] = set()
    for module in modules:
        state: Any = module._get_fsdp_state()  # type: ignore[operator]
        keeps = state._auto_reshard_after_forward and module not in inner
        for group in groups_of(state):
            if group.post_forward_mesh_info is not None and not keeps:
                found.update(map(id, group.fsdp_params))
    return found


def _shards(param: Any, names: Mapping[int, list[str]], *, reshards: bool) -> Iterator[tuple[str, Shard]]:
    """Yield the shard of an `FSDPParam` for each name of its parameter."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

    group = param.mesh_info.shard_process_group
    reduces = reducing_group(param.mesh_info)
    own, gathered = param.sharded_param.dtype, gathered_dtype(param)
    reduced = param.mp_policy.reduce_dtype or gathered
    before, after, how, _ = _get_gradient_divide_factors(group, None, reduced, param.device.type)
    for name in names[id(param.sharded_param)]:
        yield (
            name,
            Shard(
                name=name,
                shape=tuple(param._orig_size),
                dtype=own,
                local=tuple(param.sharded_size),
                rows=int(param.padded_sharded_param_size[0]),
                ranks=group.size(),
                group=group.group_name,
                reduces=reduces.group_name,
                gathered=gathered,
                reduced=reduced,
                how="avg" if how == distributed.ReduceOp.AVG else "sum",
                before=before,
                after=after,
                reshards=reshards,
            ),
        )


def _replicas(model: nn.Module) -> Replicas | None:
    """Return what a `DistributedDataParallel` does; None if the model has none."""
    reducer = reducer_of(model)
    if reducer is None:
        return None
    require_reducer(model, reducer)
    torchs: Any = reducer
    prefix = "module." if reducer is model else "model.module."
    ignored = reducer.parameters_to_ignore
    held = [(name, p) for name, p in reducer.module.named_parameters() if name not in ignored and p.requires_grad]
    syncs = torchs.will_sync_module_buffers()
    buffers = [name for name, _ in reducer.module.named_buffers() if name not in ignored] if syncs else []
    return Replicas(
        parameters=frozenset(prefix + name for name, _ in held),
        buffers=frozenset(prefix + name for name in buffers),
        ranks=distributed.get_world_size(reducer.process_group),
        group=reducer.process_group.group_name,
        bucket_bytes=int(reducer.bucket_bytes_cap),
        first_bucket_bytes=_FIRST_BUCKET_BYTES if torchs.bucket_bytes_cap_default else int(reducer.bucket_bytes_cap),
    )
