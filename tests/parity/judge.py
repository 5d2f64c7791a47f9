"""Comparing what contenders give: bits, closeness, and what a caller sees of a tensor besides its values.

A sum may cancel so far that its digits are rounding errors: eager's own then change with the layout
of what is added. So the gradient of a factor, which is such a sum, may differ from eager's by the tolerance times the
sum of the absolute values of its terms, where it has aot_eager's bits (`Outcome.magnitudes`, `close(scale=...)`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

# Closeness, relative to the largest element: kernels may add in another order.
_TOLERANCES = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.bfloat16: 3e-2, torch.float64: 1e-7}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one call left behind: results, gradients and inputs by name, or the error that it raised.

    `magnitudes`: for gradients of factors, where known, the sum of the absolute values of the terms that they add.
    """

    results: dict[str, Any]
    gradients: dict[str, torch.Tensor | None]
    state: dict[str, torch.Tensor]
    error: Exception | None = None
    magnitudes: dict[str, float] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        """All of it."""
        return {**self.results, **self.gradients, **self.state}


def seen(one: Any, two: Any, *, strides: bool) -> str | None:
    """The first difference in what a caller sees without looking at values, in words; None when there is none."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return None if type(one) is type(two) else f"{type(one).__name__} instead of {type(two).__name__}"
    for what in ("dtype", "shape", "layout", "requires_grad"):
        ours, theirs = getattr(one, what), getattr(two, what)
        if ours != theirs:
            return f"{what} {ours} instead of {theirs}"
    if strides and one.layout is torch.strided and _strides(one) != _strides(two):
        return f"strides {one.stride()} instead of {two.stride()}"
    return None


def _strides(tensor: torch.Tensor) -> list[int]:
    """The strides that decide where elements lie: not those of dimensions with one element, or of an empty tensor."""
    if tensor.numel() == 0:
        return []
    return [s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1]


def same_bits(one: Any, two: Any) -> bool:
    """Whether two values have the same bits; any NaN is like any other, and 0.0 is not -0.0."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return type(one) is type(two) and repr(one) == repr(two)
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    a, b = (_real(_dense(t)) for t in (one, two))
    if not a.is_floating_point():
        return torch.equal(a, b)
    number = ~(a.isnan() & b.isnan())
    zero = (a == 0) & (b == 0)
    differs = (a != b) | (zero & (a.signbit() != b.signbit()))
    return not bool((differs & number).any())


def close(one: Any, two: Any, *, scale: float = 1.0) -> bool:
    """Whether two values are equal up to rounding, of numbers as large as `scale` and as the largest element."""
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return type(one) is type(two) and (repr(one) == repr(two) or _close_numbers(one, two))
    if one.dtype != two.dtype or one.shape != two.shape:
        return False
    a, b = (_real(_dense(t)) for t in (one, two))
    if not a.is_floating_point():
        return torch.equal(a, b)
    a, b = a.double(), b.double()
    finite = b[b.isfinite()]
    scale = max(scale, float(finite.abs().max()) if finite.numel() else 1.0)
    limit = _TOLERANCES.get(one.dtype, 3e-2)
    return torch.allclose(a, b, rtol=limit, atol=limit * scale, equal_nan=True)


def _close_numbers(one: Any, two: Any) -> bool:
    return isinstance(one, (float, complex)) and abs(one - two) <= 1e-4 * max(1.0, abs(two))


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in plain memory: no sparse layout, no pending conjugation or negation, no quantization."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return tensor.resolve_conj().resolve_neg().contiguous()


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
