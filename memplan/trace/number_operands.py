"""Finds the Python numbers that kernels take as tensors, which a program makes once and keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from memplan.core.graph import Graph
from memplan.trace.traced import KernelCall

_ARITHMETIC = ("add", "sub", "mul", "div", "add_", "sub_", "mul_", "div_")
_KINDS = {"float32": (int, float), "float64": (int, float), "int64": (int,)}


def number_operand(kernel: KernelCall, graph: Graph) -> tuple[str, str] | None:
    """Return the number that is the second operand of a call of arithmetic, as text, and the type of the tensor that
    stands for it; None if there is none. (0.0 and -0.0 are equal, and not the same.)
    """
    if kernel.target._opname not in _ARITHMETIC or kernel.target._overloadname != "Tensor":
        return None
    args = kernel.args
    result = graph.values[kernel.outs[0] if kernel.outs and kernel.outs[0] is not None else args[0].value]
    return (repr(args[1]), result.dtype) if type(args[1]) in _KINDS.get(result.dtype, ()) else None


def number_bytes(graph: Graph, kernels: Iterable[Any]) -> int:
    """Return the most bytes that a program keeps for the numbers of its calls: which of them it keeps is chosen when
    its kernels are tried."""
    found = {number_operand(kernel, graph) for kernel in kernels if isinstance(kernel, KernelCall)}
    return sum(getattr(torch, key[1]).itemsize for key in found if key is not None)
