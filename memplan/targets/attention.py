"""Chooses the kernel of `scaled_dot_product_attention` on a GPU of NVIDIA, by one table of torch's rules.

torch chooses in C++, by the release, cuDNN's version, the capability and the tensors. `RULES` has what each kernel
asks, in the order of torch's checks. A source is a function of aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
or of sdp_utils_cpp.h beside it. The rules were read there, and in the constants and symbols of libtorch_cuda.so in
the wheels of torch 2.11.0, 2.12.0, 2.13.0 and 2.14.1 for CUDA 13 (2026-11-28).
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

# The version of cuDNN (92000 is 9.20.0) that the wheels of a release require, and that a build without CUDA plans with.
CUDNN_OF_WHEELS = {(2, 11): 91900, (2, 12): 92000, (2, 13): 92000, (2, 14): 92400}
_ALWAYS = (2, 11), (3, 0)
_HALF = (torch.float16, torch.bfloat16)
_DIMENSIONS = 4
_BIAS_ALIGNMENT = 8  # elements that the strides of the efficient kernel's mask are multiples of


def release_of(version: str) -> tuple[tuple[int, int], str]:
    """Return the release whose rules are taken for a version of torch, and a note where that is another's."""
    found = re.match(r"(\d+)\.(\d+)", version)
    asked = (int(found[1]), int(found[2])) if found else (0, 0)
    if asked in CUDNN_OF_WHEELS:
        return asked, ""
    taken = max((known for known in CUDNN_OF_WHEELS if known <= asked), default=min(CUDNN_OF_WHEELS))
    return taken, f"attention: no rule for torch {version}: assumed as for {'.'.join(map(str, taken))}"


def cudnn_version(release: tuple[int, int]) -> int:
    """Return the version of cuDNN that kernels are chosen by: of this build, or of a release's wheels."""
    version: Any = torch.backends.cudnn.version
    return (torch.version.cuda and version()) or CUDNN_OF_WHEELS[release]


class Attention(NamedTuple):
    """A call of `scaled_dot_product_attention`, and where it runs.

    `grouped`: key and value may have fewer heads than the query. `release`: of torch, as (2, 13). `cudnn`: its version.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout: float
    causal: bool
    grouped: bool
    capability: tuple[int, int]
    release: tuple[int, int]
    cudnn: int

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Query, key and value."""
        return self.query, self.key, self.value

    @property
    def types(self) -> str:
        """The types of query, key and value."""
        return ", ".join(str(x.dtype).removeprefix("torch.") for x in self.tensors)

    @property
    def widths(self) -> tuple[int, int]:
        """The sizes of a head: of the query, and of the value."""
        return self.query.shape[-1], self.value.shape[-1]

    @property
    def lengths(self) -> tuple[int, int]:
        """The numbers of queries and of keys."""
        return self.query.shape[-2], self.key.shape[-2]

    @property
    def trains(self) -> bool:
        """Whether there is a backward."""
        return torch.is_grad_enabled() and any(x.requires_grad for x in self.tensors)

    @property
    def alignment(self) -> int:
        """The elements that operands of a matrix product are aligned to (`minimum_gemm_alignment`)."""
        return max(4, 16 // self.query.dtype.itemsize)

    @property
    def wide(self) -> bool:
        """Whether cuDNN takes heads of 256 on datacenter GPUs of this kind, as torch 2.14 knows it."""
        return self.capability[0] in (9, 10) and self.cudnn > (92500 if self.capability == (10, 7) else 92200)

    def are_typed(self, *types: torch.dtype) -> bool:
        """Return whether query, key and value have one of these types."""
        return len({x.dtype for x in self.tensors}) == 1 and self.query.dtype in types

    def has_heads(self, *, grouped: bool, same: bool = True) -> bool:
        """Return whether a kernel takes the heads: equal ones, with `grouped` those that divide the query's, which are
        the `same` of key and value.
        """
        query, key, value = (x.shape[1] for x in self.tensors)
        if self.grouped and grouped:
            return query % key == query % value == 0 and (key == value or not same)
        return query == key == value or (self.release >= (2, 14) and key == value == 1)

    def has_mask_like(self) -> bool:
        """Return whether the mask has two or four dimensions, of size 1 or that of the products, and no gradient."""
        mask, products = self.mask, (*self.query.shape[:3], self.key.shape[2])
        if mask is None:
            return True
        sizes = zip(reversed(mask.shape), reversed(products), strict=False)
        return not mask.requires_grad and mask.dim() in (2, _DIMENSIONS) and all(n in (1, of) for n, of in sizes)


class KernelRule(NamedTuple):
    """A condition of kernels of attention, in the releases of torch from one up to another; `otherwise` is why not."""

    kernels: str
    releases: tuple[tuple[int, int], tuple[int, int]]
    source: str
    otherwise: str
    holds: Callable[[Attention], bool]


def _widths_of_cudnn(a: Attention) -> bool:
    """Return whether cuDNN takes heads of these sizes."""
    most = 256 if (a.wide if a.release >= (2, 14) else a.capability == (9, 0) and a.cudnn >= 91000) else 128
    special = a.capability[0] in ((9, 10) if a.release >= (2, 14) else (10,)) and a.cudnn >= 91100
    return max(a.widths) <= most or (special and a.widths == (192, 128))


_BEFORE, _SINCE = ((2, 11), (2, 14)), ((2, 14), (3, 0))
_UNITS, _STRIDES = "the last stride of a tensor is not 1", "check_last_dim_stride_equals_1_dense"
# (kernels, releases, source, why not, what has to hold)
RULES: tuple[KernelRule, ...] = tuple(
    KernelRule(*row)
    for row in (
        ("cudnn flash efficient", _ALWAYS, "check_tensor_shapes", "its tensors do not have four dimensions",
         lambda a: all(x.dim() == _DIMENSIONS for x in a.tensors)),
        ("cudnn flash", _ALWAYS, "check_dtypes_low_precision", "its types are {a.types}",
         lambda a: a.are_typed(*_HALF)),
        ("efficient", _ALWAYS, "can_use_mem_efficient_attention", "its types are {a.types}",
         lambda a: a.are_typed(*_HALF, torch.float32)),
        ("cudnn flash efficient", _ALWAYS, "check_cudnn_hardware_support and others", "the GPU's capability",
         lambda a: (8, 0) <= a.capability <= (12, 1)),
        ("cudnn flash efficient", _ALWAYS, "check_nonzero_sequence_lengths_dense", "it has no queries or no keys",
         lambda a: 0 not in a.lengths),
        ("cudnn flash", _ALWAYS, f"{_STRIDES}<true>", _UNITS,
         lambda a: a.widths[0] == 1 or all(x.stride(-1) == 1 for x in a.tensors)),
        ("efficient", _ALWAYS, f"{_STRIDES}<false>", _UNITS,
         lambda a: all(x.stride(-1) == 1 for x in a.tensors)),
        ("cudnn flash efficient", _ALWAYS, _STRIDES, "the last stride of its mask is not 1 (expanded)",
         lambda a: a.mask is None or a.mask.stride(-1) == 1),
        ("cudnn flash efficient", _ALWAYS, "check_batch_size_and_num_heads_dense", "its batches differ",
         lambda a: len({x.shape[0] for x in a.tensors}) == 1),
        ("cudnn", _ALWAYS, "check_batch_size_and_num_heads_dense<true, false>", "its heads are not in equal groups",
         lambda a: a.has_heads(grouped=True, same=False)),
        ("flash", _ALWAYS, "check_batch_size_and_num_heads_dense<true>", "its heads are not in equal groups",
         lambda a: a.has_heads(grouped=True)),
        ("efficient", _BEFORE, "check_batch_size_and_num_heads_dense<false>",
         "efficient attention takes no grouped heads",
         lambda a: a.has_heads(grouped=False)),
        ("efficient", _SINCE, "check_batch_size_and_num_heads_dense<true>", "its heads are not in equal groups",
         lambda a: a.has_heads(grouped=True)),
        ("flash", _ALWAYS, "check_for_attn_mask", "flash attention takes no mask",
         lambda a: a.mask is None),
        ("flash", _ALWAYS, "check_head_dim_size_flash", "flash attention takes heads of one size, up to 256",
         lambda a: a.widths[0] == a.widths[1] == a.key.shape[-1] <= 256),
        ("flash", _ALWAYS, "check_flash_causal_non_square_seqlens", "it is causal, and has not as many queries as keys",
         lambda a: not a.causal or a.lengths[0] == a.lengths[1]),
        ("flash", _ALWAYS, "check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120",
         "the backward of flash attention has no such heads on this GPU",
         lambda a: not (a.trains and ((8, 6) <= a.capability <= (8, 9) or a.capability >= (12, 0)))
         or a.widths[0] <= 192 or (a.widths[0] > 224 and not a.dropout)),
        ("efficient", _ALWAYS, "check_head_dim_size_mem_efficient", "its heads are not aligned",
         lambda a: a.widths[0] == a.key.shape[-1] and all(n and n % a.alignment == 0 for n in a.widths)),
        ("efficient", ((2, 13), (3, 0)), "check_data_ptr_alignment_mem_efficient", "its tensors are not aligned",
         lambda a: all(x.storage_offset() % a.alignment == 0 for x in a.tensors)),
        ("cudnn", _ALWAYS, "check_cudnn_deterministic", "cuDNN's is not deterministic",
         lambda a: not torch.are_deterministic_algorithms_enabled()
         or torch.is_deterministic_algorithms_warn_only_enabled()),
        ("cudnn", _ALWAYS, "check_attn_mask_shape", "cuDNN takes no mask of this shape, or with a gradient",
         Attention.has_mask_like),
        ("cudnn", _ALWAYS, "can_use_cudnn_attention", "this cuDNN has no dropout in attention",
         lambda a: not (a.dropout and 91100 < a.cudnn < 91400)),
        ("cudnn", ((2, 12), (3, 0)), "check_cudnn_dropout", "its dropout is no multiple of 1/16",
         lambda a: (a.dropout * 16).is_integer()),
        ("cudnn", ((2, 13), (3, 0)), "check_cudnn_tensor_shapes", "cuDNN takes up to 65535 samples and heads",
         lambda a: max(a.query.shape[:2]) <= 65535),
        ("cudnn", _ALWAYS, "check_cudnn_tensor_shapes", "cuDNN takes no heads of this size", _widths_of_cudnn),
        ("cudnn", _ALWAYS, "check_cudnn_tensor_shapes", "the sizes of its heads are no multiples of 8",
         lambda a: a.widths[0] % 8 == a.widths[1] % 8 == 0),
        ("cudnn", _ALWAYS, "check_cudnn_tensor_shapes", "it has one key, or one query and dropout",
         lambda a: a.lengths[1] != 1 and not (a.dropout and a.lengths[0] == 1)),
        ("cudnn", _SINCE, "check_cudnn_d256_bprop_head_dim", "cuDNN's backward takes no heads of this size",
         lambda a: not (a.trains and a.wide) or max(a.widths) <= 128 or a.widths in ((192, 128), (256, 256))),
    )
)  # fmt: skip


def attention_kernel(attention: Attention) -> tuple[str, str]:
    """Return the kernel of an attention ("cudnn", "flash", "efficient" or "math"), and why those that torch tries
    before it are not taken: of each, the first rule that does not hold.

    cuDNN's is tried first where `check_prefer_cudnn_attention` says so; otherwise the order is that of `Context.h`.
    Raises `RuntimeError`, as torch does, where its flags forbid all that could run.
    """
    major, minor = attention.capability
    prefers = major in (9, 10) and (attention.release >= (2, 13) or minor in (0, 3)) and attention.cudnn > 91500
    if os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") == "1":
        prefers = False
    reasons: dict[str, None] = {}
    for kernel in ("cudnn", "flash", "efficient", "math") if prefers else ("flash", "efficient", "math", "cudnn"):
        broken = next(_broken(attention, kernel), None)
        if broken is None:
            return kernel, ", ".join(reasons)
        reasons[broken] = None
    raise RuntimeError(f"No available kernel for an attention: {', '.join(reasons)}")


def _broken(attention: Attention, kernel: str) -> Iterator[str]:
    """Yield why a kernel does not take an attention."""
    if not getattr(torch.backends.cuda, f"{'mem_' * (kernel == 'efficient')}{kernel}_sdp_enabled")():
        yield f"torch's flags forbid {kernel}"
    for kernels, (first, until), _, otherwise, holds in RULES:
        if kernel in kernels.split() and first <= attention.release < until and not holds(attention):
            yield otherwise.format(a=attention)


def choose_attention(capability: tuple[int, int], notes: set[str]) -> torch.library.Library:
    """Have attention of tensors on CUDA take the kernel of a capability, as long as the result lives.

    Whose rules are taken for a release of torch that has none here is added to `notes`.
    """
    aten = torch.ops.aten
    release, assumed = release_of(torch.__version__)
    cudnn = cudnn_version(release)

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
        tensors, mask = (query, key, value), attn_mask
        if release >= (2, 14) and all(x.dim() == _DIMENSIONS - 1 for x in tensors):  # normalize_unbatched_input
            mask = mask if mask is None else mask[(None,) * (_DIMENSIONS - mask.dim())]
            query, key, value = (x.unsqueeze(0) for x in tensors)
            found = attention(query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return found.squeeze(0)
        call = Attention(*tensors, mask, dropout_p, is_causal, enable_gqa, capability, release, cudnn)
        name = attention_kernel(call)[0]
        notes.update({assumed} - {""})
        if name == "math":
            return aten._scaled_dot_product_attention_math(
                *tensors, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )[0]
        if name == "flash":
            width, scale = query.shape[-1], scale or 1 / math.sqrt(query.shape[-1])
            padded = (torch.nn.functional.pad(x, (0, -width % 8)) if width % 8 else x for x in tensors)
            found = aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
            return found[..., :width] if width % 8 else found
        if mask is not None and mask.dtype is torch.bool:
            here: dict[str, Any] = {"dtype": query.dtype, "device": query.device}
            mask = torch.where(mask, torch.zeros((), **here), torch.full((), float("-inf"), **here))
        if name == "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                *tensors, mask, call.trains, dropout_p, is_causal, False, scale=scale
            )[0]
        if mask is not None:
            if any(stride % _BIAS_ALIGNMENT for stride in mask.stride()[:-1]):  # preprocess_mask
                keys = mask.shape[-1]
                mask = torch.nn.functional.pad(mask, (0, _BIAS_ALIGNMENT - keys % _BIAS_ALIGNMENT))[..., :keys]
            mask = mask.expand(*query.shape[:3], key.shape[2])
        return aten._scaled_dot_product_efficient_attention(
            *tensors, mask, call.trains, dropout_p, is_causal, scale=scale
        )[0]

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for dispatch in ("AutogradCUDA", "CUDA"):
        library.impl("scaled_dot_product_attention", attention, dispatch)  # type: ignore[no-untyped-call]
    return library
