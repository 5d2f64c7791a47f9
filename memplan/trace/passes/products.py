"""Lowering rules for products of three factors, one of them a number: one pass instead of two, with the same bits."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from memplan.trace.passes.nodes import is_fixed, span
from memplan.trace.passes.own_outputs import is_backward
from memplan.trace.passes.rewrite import Rewriter, aten, storage_key, value

_EXPONENTS = 100  # powers of two up to this have inverses that are normal float32 numbers
_LARGEST = torch.finfo(torch.float32).max  # mul treats larger numbers as infinite, addcmul refuses them


def multiplied(rw: Rewriter, result: torch.Tensor, x: fx.Node, y: fx.Node, scale: float) -> fx.Node:
    """Return the op that makes `result` as (scale * x) * y, on the CPU.

    A kernel may multiply and add at once: adding -0.0 changes no bit either way. It would convert a mask in memory of
    its own; here a mask is converted first, in bytes that the result can take.
    """
    if value(x).dtype is torch.bool:
        with rw.mode:
            factors = rw.scratch(torch.empty_like(value(x), dtype=result.dtype))
        rw.call(aten.copy_.default, factors, x)
        x = factors
    zero = rw.number(-0.0, result.dtype, result.device)
    return rw.making(result, aten.addcmul.default, zero, x, y, value=scale)


def product(rw: Rewriter, x: Any, y: Any) -> fx.Node | None:
    """Return the product of `x`, `y` and a number where one factor is a number times a tensor that nothing else reads.

    Returns None, for "leave it", in all other cases.
    """
    result = value(rw.node)
    if not rw.constants or result.dtype is not torch.float32 or result.device.type != "cpu" or x is y:
        return None  # CUDA's kernel multiplies the three in another order
    for inner, other in ((x, y), (y, x)):
        if isinstance(inner, fx.Node) and isinstance(other, fx.Node) and value(other).dtype is torch.float32:
            scaled = _scaled(rw, inner)
            if scaled is not None:
                new = multiplied(rw, result, scaled[0], other, scaled[1])
                rw.node.replace_input_with(inner, other)  # the node is erased next
                rw.graph.erase_node(inner)
                return new
    return None


def _scaled(rw: Rewriter, inner: fx.Node) -> tuple[fx.Node, float] | None:
    """Return the tensor and the number that `inner` multiplies, if only this product reads that, and the tensor can
    live on.

    A quotient by a power of two is the product with its inverse, rounded in the same way.
    """
    if inner.target not in (aten.mul.Tensor, aten.div.Tensor) or len(inner.users) != 1 or inner.kwargs:
        return None
    x, number = inner.args
    if not isinstance(x, fx.Node) or not isinstance(number, (int, float)):
        return None
    if (
        value(x).dtype is not torch.float32
        or is_backward(inner) != is_backward(rw.node)
        or not _can_read_later(rw, x, inner)
    ):
        return None
    if inner.target is aten.mul.Tensor:
        return None if _LARGEST < abs(number) < math.inf else (x, number)
    mantissa, exponent = math.frexp(number)
    return (x, 1 / number) if abs(mantissa) == 0.5 and abs(exponent) < _EXPONENTS else None


def _can_read_later(rw: Rewriter, x: fx.Node, inner: fx.Node) -> bool:
    """Return whether `x` can be read at the outer product: nothing writes it, and keeping it takes no more bytes."""
    base, key = x, storage_key(value(x))
    if key in rw.written:
        return False
    while base.op == "call_function":
        above = base.args[0] if base.args else None
        val = above.meta.get("val") if isinstance(above, fx.Node) else None
        if not isinstance(val, torch.Tensor) or storage_key(val) != key:
            sizes = value(base), value(inner)
            return all(map(is_fixed, sizes)) and span(sizes[0]) <= span(sizes[1])
        assert isinstance(above, fx.Node)
        base = above
    return True
