"""The tensor of this rank behind a DTensor: what kernels read, and what a program is bound to.

`placed_parameters` reads the DTensors of tensor parallelism into plain values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed, nn

from memplan.distributed.refusals import require_even, require_one_mesh, require_placed, require_plain_buffers


def is_distributed(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, of which this rank has a part."""
    if not distributed.is_available() or type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local_tensor(tensor: Any) -> Any:
    """Return this rank's part of a DTensor, which requires a gradient as the DTensor does; others as they are.

    It has the bytes of the DTensor: what is written to the one is written to the other.
    """
    if not is_distributed(tensor):
        return tensor
    return tensor._local_tensor.detach().requires_grad_(tensor.requires_grad)


def largest_part(tensor: Any) -> Any:
    """Return a tensor on the meta device like the largest part of a DTensor that a rank has; others as they are."""
    if not is_distributed(tensor):
        return tensor
    shape = list(tensor.shape)
    for placement, ranks in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        if placement.is_shard():
            shape[placement.dim] = -(-shape[placement.dim] // ranks)
    return torch.empty(shape, dtype=tensor.dtype, device="meta")


def placed_like(part: torch.Tensor, spec: Any) -> Any:
    """Return a DTensor of which this rank has a part; `spec` says where torch has placed it, as of another such one."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    known = spec.tensor_meta
    meta = TensorMeta(shape=known.shape, stride=known.stride, dtype=part.dtype)
    made = DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(part, made, requires_grad=False)  # type: ignore[no-untyped-call]


class LocalTensors:
    """A view of a dict of tensors that gives this rank's part of each DTensor: `holder[key]` as `local_tensor` does."""

    def __init__(self, holder: dict[str, Any]) -> None:
        self.holder = holder

    def __getitem__(self, key: str) -> Any:
        """Return this rank's part of a tensor of the dict."""
        return local_tensor(self.holder[key])

    def attached(self, key: str) -> Any:
        """Return this rank's part as autograd knows it: its gradient becomes a part of the DTensor's."""
        return self.holder[key].to_local()


Slot = dict[str, Any] | LocalTensors


def of_this_rank(holder: dict[str, Any], key: str) -> Slot:
    """Return the dict that holds a tensor, or a view of it that gives this rank's part if the tensor is a DTensor."""
    return LocalTensors(holder) if is_distributed(holder[key]) else holder


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedParameter:
    """A parameter of which each rank of a group has a part (`dim`), or a copy (None).

    `placements` are torch's. `local` is the shape of this rank's part, before `fully_shard` divides that too, and
    `start` its first element along the dimension.
    """

    name: str
    shape: tuple[int, ...]
    local: tuple[int, ...]
    dim: int | None
    start: int
    placements: tuple[Any, ...]
    ranks: int
    group: str

    @property
    def line(self) -> str:
        """The parameter in one line, equal on all ranks."""
        how = "copied" if self.dim is None else f"divided along dimension {self.dim}"
        return f"parameter {self.name}: {'x'.join(map(str, self.shape))}, {how} among {self.ranks} ranks"


def placed_parameters(model: nn.Module, inner: Mapping[str, Any]) -> dict[str, PlacedParameter]:
    """Return the placed parameters of a model, by each of their names.

    Args:
        model: The model.
        inner: The specification of parameters that `fully_shard` has divided among other ranks again, by name; None for
            those that it has divided alone.

    Raises:
        UnsupportedGraph: A parameter or buffer is placed in a way that cannot be planned.
    """
    require_plain_buffers(name for name, b in model.named_buffers() if is_distributed(b))
    found = {}
    for name, spec, local in _specs(model, inner):
        require_placed(name, spec)
        (placement,) = spec.placements
        group = spec.mesh.get_group()
        dim = placement.dim if placement.is_shard() else None
        if dim is not None and name in inner:
            require_even(name, spec.shape[dim], group.size())
        found[name] = PlacedParameter(
            name=name,
            shape=tuple(spec.shape),
            local=tuple(local),
            dim=dim,
            start=0 if dim is None else _start(spec.shape[dim], group),
            placements=tuple(spec.placements),
            ranks=group.size(),
            group=group.group_name,
        )
    require_one_mesh({name: one.group for name, one in found.items()})
    return found


def group_of_all() -> str:
    """Return the name of the group of all ranks."""
    found: Any = distributed.group.WORLD
    return str(found.group_name)


def _start(size: int, group: Any) -> int:
    """Return the first of this rank's elements of a dimension that torch has divided into parts of one size."""
    each = -(-size // group.size())
    return min(size, int(each * distributed.get_rank(group)))


def _specs(model: nn.Module, inner: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each placed parameter, where it is placed, and the shape of this rank's part."""
    for name, p in model.named_parameters(remove_duplicate=False):
        if name not in inner and is_distributed(p):
            yield name, p._spec, p._local_tensor.shape  # type: ignore[attr-defined]
        elif inner.get(name) is not None:
            yield name, *inner[name]
