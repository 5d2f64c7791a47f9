"""Reads the parameters that torch's tensor parallelism has placed on the ranks of a mesh: DTensors of one dimension.

A rank's part of such a parameter stays where it is: what the model computes from the parts, and the collectives that
torch adds between them, are in the graph that is traced.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import distributed, nn

from memplan.distributed.local import is_distributed
from memplan.distributed.refusals import require_even, require_one_mesh, require_placed, require_plain_buffers


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


def group_of_placed(model: nn.Module) -> str | None:
    """Return the name of the group that a parameter is placed on, unchecked; None if none is."""
    for _, p in model.named_parameters():
        if is_distributed(p):
            mesh = p.device_mesh  # type: ignore[attr-defined]
            return str(mesh.get_group(0).group_name) if mesh.ndim == 1 else group_of_all()
    return None


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
