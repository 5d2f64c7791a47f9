"""Returned memory that nothing writes (`torch.empty` and its kin) is an output like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan

_EMPTY: dict[str, Callable[[torch.Tensor], Any]] = {
    "new_empty(0)": lambda y: y.new_empty(0),
    "new_empty": lambda y: y.new_empty(4),
    "empty": lambda y: torch.empty(4, 2),
    "empty of integers": lambda y: torch.empty(3, dtype=torch.int64),
    "empty_like": torch.empty_like,
    "empty_strided": lambda y: torch.empty_strided((2, 3), (1, 2)),
    "new_empty_strided": lambda y: y.new_empty_strided((2, 3), (1, 2)),
    "empty_permuted": lambda y: torch.empty_permuted((2, 3), (1, 0)),
    "a view": lambda y: y.new_empty(4, 2).t(),
}


class Scaled(nn.Module):
    """x * w, and memory."""

    def __init__(self, empty: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(3))
        self.empty = empty

    def forward(self, x: torch.Tensor) -> Any:
        y = x * self.w
        return y, self.empty(y)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("empty", _EMPTY)
def test_returned_memory_is_the_callers(empty: str, *, train: bool) -> None:
    model, x = Scaled(_EMPTY[empty]), torch.randn(2, 3)
    compiled = memplan.compile(model, x, train=train)
    (_, theirs), (y, ours) = model(x), compiled(x)
    assert (ours.shape, ours.stride(), ours.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
    assert not ours.requires_grad
    ours.fill_(7)
    if train:
        y.sum().backward()
    _, again = compiled(x)
    assert (ours == 7).all(), "the next call has memory of its own"
    assert again.untyped_storage().data_ptr() != ours.untyped_storage().data_ptr() or not ours.numel()
