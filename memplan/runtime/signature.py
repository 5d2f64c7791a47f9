"""What a compiled step may be called with: the example's structure, shapes, dtypes, devices and constants."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree

from memplan.errors import InputMismatch
from memplan.trace.traced import Source, TracedGraph


class Signature:
    """Checks a call against the traced one and turns it into the tensors that `forward` takes."""

    def __init__(self, traced: TracedGraph) -> None:
        self.spec = traced.in_spec
        self.examples = traced.example_inputs
        self.bound = [(b.index, traced.graph.values[b.value]) for b in traced.bound(Source.INPUT)]
        self.requires_grad = {b.index: b.requires_grad for b in traced.bound(Source.INPUT)}
        self._simple = all(isinstance(x, torch.Tensor) for x in self.examples) and self.spec == _spec_of(self.examples)
        self._expected = [
            (i, x.shape, x.dtype, x.device, x.stride())
            for i, x in enumerate(self.examples)
            if isinstance(x, torch.Tensor)
        ]
        self._constants = [(i, x) for i, x in enumerate(self.examples) if not isinstance(x, torch.Tensor)]

    def flatten(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a call. Raises `InputMismatch` naming the first difference from the traced call."""
        if self._simple and not kwargs and len(args) == len(self.examples):
            leaves = list(args)
        else:
            leaves, spec = pytree.tree_flatten((args, kwargs))
            if spec != self.spec:
                what = f"the call has {_shape_of_call(spec)}, the plan was made for {_shape_of_call(self.spec)}"
                raise _mismatch("arguments", what)
        for i, shape, dtype, device, strides in self._expected:
            x = leaves[i]
            if type(x) is not torch.Tensor and not isinstance(x, torch.Tensor):
                raise _mismatch(f"input {i}", f"is a {type(x).__name__}, the plan was made for a tensor")
            if x.shape != shape or x.dtype is not dtype or x.device != device:
                wanted = f"the plan was made for {dtype} {tuple(shape)} on {device}"
                raise _mismatch(f"input {i}", f"is {x.dtype} {tuple(x.shape)} on {x.device}, {wanted}")
            if x.stride() != strides:
                leaves[i] = torch.empty_strided(shape, strides, dtype=dtype, device=device).copy_(x)
        for i, constant in self._constants:
            if type(leaves[i]) is not type(constant) or leaves[i] != constant:
                raise _mismatch(f"input {i}", f"is {leaves[i]!r}, the plan was made for {constant!r}")
        return leaves

    def check_gradients(self, leaves: list[Any]) -> None:
        """Raise when an input wants a gradient that was not traced (it would silently get none)."""
        for i, wanted in self.requires_grad.items():
            if leaves[i].requires_grad and not wanted:
                raise _mismatch(f"input {i}", "requires a gradient, the plan was made for one that does not")

    def tensors(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The leaves that `forward` takes, in the order of its arguments."""
        return [leaves[i] for i, _ in self.bound]


def _mismatch(where: str, what: str) -> InputMismatch:
    hint = 'call it like the example inputs, compile again, or pass on_mismatch="eager" or "replan"'
    return InputMismatch(what, where=where, hint=hint)


def _spec_of(args: tuple[Any, ...]) -> pytree.TreeSpec:
    return pytree.tree_flatten((args, {}))[1]


def _shape_of_call(spec: pytree.TreeSpec) -> str:
    args, kwargs = spec.children()
    names = f" and keywords {', '.join(map(str, kwargs.context))}" if kwargs.num_children else ""
    return f"{args.num_children} positional arguments{names} ({spec.num_leaves} leaves in all)"
