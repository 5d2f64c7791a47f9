"""Chooses the kernel of `scaled_dot_product_attention` on a GPU of NVIDIA, as torch does in C++.

The rules are those of `select_sdp_backend` in torch's aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, for
torch 2.11 to 2.14 and cuDNN 9.
"""

from __future__ import annotations

from typing import Any

import torch

_HALF = (torch.float16, torch.bfloat16)
_DIMENSIONS = 4


def attention_kernel(  # noqa: PLR0917
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    grouped: bool,
    capability: tuple[int, int],
) -> str:
    """Return the kernel of an attention: "cudnn", "flash", "efficient" or "math".

    On capability 9.0 and later, cuDNN's comes first. All but "math" take tensors of four dimensions and one type whose
    last stride is 1, the mask too. `grouped`: key and value may have fewer heads than the query.
    """
    tensors = (query, key, value)
    width, of_values = query.shape[-1], value.shape[-1]
    dense = all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in tensors) and (mask is None or mask.stride(-1) == 1)
    plain = dense and all(x.dim() == _DIMENSIONS for x in tensors) and query.dtype == key.dtype == value.dtype
    half = plain and query.dtype in _HALF and capability >= (8, 0)
    heads = len({x.shape[1] for x in tensors}) == 1 if plain else False
    fits = {
        "cudnn": half and width % 8 == of_values % 8 == 0 and max(width, of_values) <= 128 and query.shape[-2] > 1
        and not (mask is not None and mask.requires_grad) and (heads or grouped),
        "flash": half and mask is None and width == of_values <= 256 and (heads or grouped),
        "efficient": plain and query.dtype in (*_HALF, torch.float32) and heads,
        "math": True,
    }  # fmt: skip
    flags: Any = torch.backends.cuda
    allowed = {
        "cudnn": flags.cudnn_sdp_enabled(),
        "flash": flags.flash_sdp_enabled(),
        "efficient": flags.mem_efficient_sdp_enabled(),
        "math": True,
    }
    first = ("cudnn", "flash", "efficient") if capability >= (9, 0) else ("flash", "efficient", "cudnn")
    return next(name for name in (*first, "math") if fits[name] and allowed[name])


def why_single(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> str:
    """Return why no fused kernel takes an attention: the first of the rules that do not hold."""
    tensors = (query, key, value)
    if mask is not None and mask.stride(-1) != 1:
        return "the last stride of its mask is not 1, as of one that was expanded"
    if any(x.dim() != _DIMENSIONS for x in tensors):
        return "its tensors do not have four dimensions"
    if len({x.dtype for x in tensors}) > 1 or query.dtype not in (*_HALF, torch.float32):
        return f"its types are {', '.join(str(x.dtype).removeprefix('torch.') for x in tensors)}"
    if any(x.stride(-1) != 1 and x.shape[-1] != 1 for x in tensors):
        return "the last stride of a tensor is not 1"
    if grouped and query.dtype is torch.float32:
        return "grouped heads are fused in half precision alone"
    return "torch's flags forbid the fused kernels that would take it"


def choose_attention(capability: tuple[int, int], notes: set[str]) -> torch.library.Library:
    """Have attention of tensors on CUDA take the kernel of a capability, as long as the result lives.

    Why none is fused is added to `notes`.
    """
    aten = torch.ops.aten

    def attention(  # noqa: PLR0917  # the arguments of the op
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        """Call the kernel."""
        name = attention_kernel(query, key, value, attn_mask, enable_gqa, capability)
        if name == "math":
            why = why_single(query, key, value, attn_mask, enable_gqa)
            notes.add(f"attention runs in single ops, which need more memory than a fused kernel: {why}")
            return aten._scaled_dot_product_attention_math(
                *(query, key, value, attn_mask, dropout_p, is_causal), scale=scale, enable_gqa=enable_gqa
            )[0]
        if name == "flash":
            return aten._scaled_dot_product_flash_attention(
                query, key, value, dropout_p, is_causal, False, scale=scale
            )[0]
        grad = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        mask = attn_mask
        if mask is not None and mask.dtype is torch.bool:
            here: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
            mask = torch.where(mask, torch.zeros((), **here), torch.full((), float("-inf"), **here))
        if name == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, grad, dropout_p, is_causal, False, scale=scale
            )[0]
        if mask is not None:
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            query, key, value, mask, grad, dropout_p, is_causal, scale=scale
        )[0]

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for dispatch in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", attention, dispatch)  # type: ignore[no-untyped-call]
    return library
