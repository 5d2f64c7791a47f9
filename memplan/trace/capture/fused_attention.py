"""Keeps attention in a fused kernel of a GPU where its mask alone prevents that, and says why others are not fused.

No fused kernel takes a mask whose last stride is not 1, as that of an expanded or a permuted tensor is. Torch then
takes attention apart, and every product of queries and keys is saved for the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from memplan.targets.attention import Attention, attention_kernel, cudnn_version, release_of
from memplan.trace.passes.nodes import is_fixed

_NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_DIMENSIONS = 4


class FusedAttention(TorchFunctionMode):
    """Copies masks into rows that a fused kernel takes, where torch would take an attention on a GPU of NVIDIA apart.

    With `lay_out` off, attentions stay as they are. `reasons`: why some of those that were traced run in single ops.

    Example:
        >>> with FusedAttention(lay_out=True) as attention:
        ...     traced = trace(model)
        >>> list(attention.reasons)
        ['its types are float64, float64, float64']
    """

    def __init__(self, *, lay_out: bool) -> None:
        super().__init__()
        self._lay_out = lay_out
        self.reasons: dict[str, None] = {}  # each once

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not torch.nn.functional.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        given = {**dict(zip(_NAMES, args, strict=False)), **(kwargs or {})}
        tensors = [given[name] for name in _NAMES[:4] if given.get(name) is not None]
        if tensors[0].is_cuda and torch.version.hip is None and all(map(is_fixed, tensors)):
            mask = given.get("attn_mask")
            kernel, why = _kernel(given, mask)
            if kernel == "math" and mask is not None and self._lay_out:
                laid = in_rows(mask)
                kernel, why = _kernel(given, laid)
                if kernel != "math":
                    given["attn_mask"] = laid
            if kernel == "math":
                self.reasons[why] = None
        return func(**given)


def in_rows(mask: torch.Tensor) -> torch.Tensor:
    """Return a mask with a last stride of 1: a copy, expanded along what it was expanded along, but for its rows."""
    once = mask[tuple(slice(1 if stride == 0 else None) for stride in mask.stride()[:-1])]
    return once.clone(memory_format=torch.contiguous_format).expand(mask.shape)


def _kernel(given: dict[str, Any], mask: torch.Tensor | None) -> tuple[str, str]:
    """Return the kernel that an attention takes with a mask, and why not those that torch tries before it."""
    release = release_of(torch.__version__)[0]
    device = given["query"].device
    cast = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    query, key, value = (_like(given[name], cast) for name in _NAMES[:3])
    known = None if mask is None else _like(mask, cast)
    if release >= (2, 14) and query.dim() == key.dim() == value.dim() == _DIMENSIONS - 1:  # a batch of one
        query, key, value = query[None], key[None], value[None]
        known = None if known is None else known[(None,) * (_DIMENSIONS - known.dim())]
    return attention_kernel(
        Attention(
            query,
            key,
            value,
            known,
            given.get("dropout_p", 0.0),
            given.get("is_causal", False),
            given.get("enable_gqa", False),
            torch.get_device_module("cuda").get_device_capability(device),
            release,
            cudnn_version(release),
        )
    )


def _like(x: torch.Tensor, cast: torch.dtype | None) -> torch.Tensor:
    """Return a tensor without bytes that is laid out like another, in the type to which autocast casts it."""
    dtype = cast if cast is not None and x.is_floating_point() and x.dtype is not torch.float64 else x.dtype
    whole = x.storage_offset() + 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    made = torch.empty(max(whole, 0), dtype=dtype, device="meta", requires_grad=x.requires_grad)
    return made.as_strided(x.shape, x.stride(), x.storage_offset())
