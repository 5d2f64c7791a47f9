"""Memory layouts: a tensor with the same shape in other strides, as calls and incoming gradients may have them."""

from __future__ import annotations

from collections.abc import Callable

import torch

# In these, elements share bytes.
OVERLAPPING = ("expanded", "window")
NAMES = ("dense", "transposed", "expanded", "window", "channels_last")


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The tensor in new memory: in this layout where it has the dimensions for it, otherwise as it was.

    Where elements come to share bytes, one of their values is kept.
    """
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        return tensor.clone()
    made = _MAKERS[layout](tensor) if layout != "dense" else None
    return _copied(tensor) if made is None else made


def as_example(tensor: torch.Tensor, example: torch.Tensor) -> torch.Tensor:
    """The tensor in memory with the example's strides; as it is where elements of the example share bytes."""
    if example.layout is not torch.strided or overlaps(example) or tensor.stride() == example.stride():
        return tensor
    return torch.empty_strided(example.shape, example.stride(), dtype=example.dtype).copy_(tensor)


def applies(tensor: torch.Tensor, layout: str) -> bool:
    """Whether the layout gives this tensor other strides, so that a case of its own makes sense."""
    return tensor.layout is torch.strided and laid_out(tensor, layout).stride() != tensor.stride()


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, those with shared bytes included."""
    if tensor.numel() == 0 or overlaps(tensor):
        span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
        bytes_of = torch.as_strided(tensor, (span,), (1,)).clone()
        return bytes_of.as_strided(tensor.shape, tensor.stride())
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype).copy_(tensor)


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements of the tensor share bytes, by the rule that sorted strides must step over what is below."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return False
    end = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1):
        if stride < end:
            return True
        end = stride * (size - 1) + end
    return False


def _transposed(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.dim() < 2:
        return None
    return tensor.transpose(-1, -2).clone(memory_format=torch.contiguous_format).transpose(-1, -2)


def _expanded(tensor: torch.Tensor) -> torch.Tensor | None:
    wide = [d for d, n in enumerate(tensor.shape) if n > 1]
    if not wide:
        return None
    kept = tensor.narrow(wide[0], 0, 1).clone(memory_format=torch.contiguous_format)
    return kept.expand(tensor.shape)


def _window(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.dim() < 2 or min(tensor.shape[-2:]) < 2 or tensor.numel() == 0:
        return None
    rows = torch.cat((tensor[..., 0, :], tensor[..., 1:, -1]), dim=-1).contiguous()
    return rows.unfold(-1, tensor.shape[-1], 1)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor | None:
    if tensor.dim() < 3 or tensor.dim() > 5:
        return None
    return tensor.movedim(1, -1).clone(memory_format=torch.contiguous_format).movedim(-1, 1)


_MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor | None]] = {
    "transposed": _transposed,
    "expanded": _expanded,
    "window": _window,
    "channels_last": _channels_last,
}
