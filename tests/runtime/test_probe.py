"""Trying kernels: comparing bytes of tensors with any strides, and finding out who resizes, in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.runtime.kernels import same_bytes
from tests.models import Made


def test_bytes_are_compared_and_not_numbers() -> None:
    nan = torch.tensor([float("nan")])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert not same_bytes(torch.ones(2), torch.ones(2, dtype=torch.int32))
    assert not same_bytes(torch.ones(2), torch.ones(1, 2))
    whole = torch.arange(6.0).view(2, 3)
    assert same_bytes(whole.t(), whole.t().clone())
    assert not same_bytes(whole[:, 1], whole[:, 2])
    z = torch.tensor([1 + 2j, 3 - 4j])
    assert same_bytes(z.conj(), torch.tensor([1 - 2j, 3 + 4j]))
    assert not same_bytes(z.conj(), z)
    assert same_bytes(z.conj().imag, torch.tensor([-2.0, 4.0]))


def _scaled(op: Callable[[torch.Tensor], Any]) -> Made:
    """What `op` makes of x * w."""
    return Made(lambda m, x: op(x * m.w), w=nn.Parameter(torch.rand(3)))


_FEW: dict[str, Callable[[torch.Tensor], Any]] = {
    "sort": lambda y: torch.sort(y[:1, 0], 0),
    "svd of (0, 0)": lambda y: torch.linalg.svd(y[:0, :0]),
    "svd of (1, 1)": lambda y: torch.linalg.svd(y[:1, :1]),
    "a batch of one": lambda y: torch.sort(y[:1].t(), 0),
}


@pytest.mark.parametrize("op", _FEW)
def test_results_of_few_elements_are_those_of_eager(op: str) -> None:
    model, x = _scaled(_FEW[op]), torch.rand(2, 3)
    compiled = memplan.compile(model, x, sanitize="poison")
    for x in (torch.rand(2, 3), torch.rand(2, 3)):
        with torch.no_grad():
            assert all(map(torch.equal, compiled(x), model(x)))
        sum(y.sum() for y in compiled(x)).backward()


def test_a_loss_that_resizes_is_tried_in_silence(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = _scaled(lambda y: nn.functional.binary_cross_entropy(y.sigmoid(), torch.ones_like(y)))
    x = torch.rand(2, 3)
    assert torch.equal(memplan.compile(model, x)(x), model(x))
    assert "resized" not in "".join(capfd.readouterr())
