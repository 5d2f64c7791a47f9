"""A case as a module, with the inputs of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn

from tests.parity import layouts
from tests.parity.cases import Case
from tests.parity.catalog import Sample, entries


class Program(nn.Module):
    """`t * w -> call -> result * v`, without the last multiplication, or without both, as the form says.

    The parameters are numbers a little below 1, so that symmetric, positive or normalised samples remain so. Where the
    sample has tensors that require gradients, only these are multiplied; where it has none, the call has no derivative,
    and what its inputs are multiplied by is no parameter.

    `factors`, where it is a dictionary, gets what is multiplied by each parameter with a derivative, and the product.
    """

    def __init__(self, sample: Sample, form: str) -> None:
        super().__init__()
        leaves, spec = pytree.tree_flatten((sample.args, sample.kwargs))
        self.call = sample.make()
        self.derivable = sample.derivable
        self.spec = spec
        self.constants = [None if isinstance(x, torch.Tensor) else x for x in leaves]
        self.places = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor)]
        self.form = form
        self.factors: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None
        self.scales = nn.ParameterList()
        self.scale = nn.ParameterList()
        self.scaled = [False] * len(self.places)
        derivable = any(leaves[i].requires_grad for i in self.places)
        if form != "plain":
            for k, i in enumerate(self.places):
                x = leaves[i]
                if x.requires_grad or (not derivable and (x.is_floating_point() or x.is_complex())):
                    self.scaled[k] = True
                    value = torch.tensor(0.96875 - k / 64, dtype=x.dtype)
                    self.scales.append(nn.Parameter(value, requires_grad=derivable))
        if form == "between":
            self.scale.append(nn.Parameter(torch.tensor(0.8125)))

    def magnitudes(self) -> dict[str, float]:
        """By parameter, the sum of the absolute values of the terms of its gradient, after a backward."""
        noted = self.factors or {}
        return {
            n: float((x.detach() * p.grad).abs().double().sum()) for n, (x, p) in noted.items() if p.grad is not None
        }

    def _noted(self, name: str, factor: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        if self.factors is not None and product.requires_grad:
            product.retain_grad()
            self.factors[name] = (factor, product)
        return product

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self.constants)
        used = 0
        for k, (i, tensor) in enumerate(zip(self.places, tensors, strict=True)):
            leaves[i] = tensor
            if self.scaled[k]:
                leaves[i] = self._noted(f"scales.{used}", tensor, tensor * self.scales[used])
                used += 1
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        result = self.call(*args, **kwargs)
        if self.form != "between":
            return result
        return [_times(x, self.scale[0]) for x in pytree.tree_leaves(self.derivable(result))]


def _times(result: Any, scale: torch.Tensor) -> Any:
    if isinstance(result, torch.Tensor) and (result.is_floating_point() or result.is_complex()):
        return result * scale
    return result


class Material:
    """What a case needs to be run: the program, the example's tensors, and those of each call."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.entry = entries()[case.entry]
        self.example = self.entry.sample(case.dtype, case.index, 0)
        self._calls = [self._values(1 + i) for i in range(len(case.call_layouts))]

    def program(self) -> Program:
        """A new program, each time with the same parameters."""
        return Program(self.example, self.case.form)

    def example_inputs(self) -> tuple[torch.Tensor, ...]:
        """The example's tensors in its layout, in new memory."""
        return self._ready([layouts.laid_out(t, self.case.layout) for t in self.example.tensors])

    def inputs(self, call: int, *, laid_out: bool = False) -> tuple[torch.Tensor, ...]:
        """The tensors of a call in its layout, in new memory.

        `laid_out`: copied to the example's strides, as memplan does, except where the example's elements share bytes.
        """
        given = [layouts.laid_out(t, self.case.call_layouts[call]) for t in self._calls[call]]
        if laid_out:
            given = [layouts.as_example(x, e) for x, e in zip(given, self.example_inputs(), strict=True)]
        return self._ready(given)

    def _ready(self, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        asked = [t.requires_grad and self.case.form == "plain" for t in self.example.tensors]
        return tuple(t.requires_grad_() if wanted else t for t, wanted in zip(tensors, asked, strict=True))

    def _values(self, seed: int) -> list[torch.Tensor]:
        """The same sample with other values; the example's own where a sample's form depends on its values."""
        try:
            other = self.entry.sample(self.case.dtype, self.case.index, seed)
        except KeyError:
            return self.example.tensors
        return other.tensors if _alike(other, self.example) else self.example.tensors


def _alike(one: Sample, two: Sample) -> bool:
    """Whether two samples differ in nothing but the values of their tensors."""
    a, first = pytree.tree_flatten((one.args, one.kwargs))
    b, second = pytree.tree_flatten((two.args, two.kwargs))
    return first == second and all(map(_same_leaf, a, b))


def _same_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        strides = a.layout is not torch.strided or (b.layout is torch.strided and a.stride() == b.stride())
        return (a.shape, a.dtype, a.layout) == (b.shape, b.dtype, b.layout) and strides
    return type(a) is type(b) and repr(a) == repr(b)
