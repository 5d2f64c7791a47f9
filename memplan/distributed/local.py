"""The tensor of this rank behind a DTensor: what kernels read, and what a program is bound to."""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed


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
