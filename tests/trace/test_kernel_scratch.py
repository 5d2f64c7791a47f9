"""Kernels of this machine that take memory for themselves, as `memplan.fits` counts them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.trace import kernel_scratch


class Depthwise(nn.Module):
    """A depthwise convolution, whose backward takes more than its results (oneDNN), and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.deep = nn.Conv2d(32, 32, 7, padding=3, groups=32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.deep(self.norm(self.stem(x))).square().mean()
        return loss


class Recurrent(nn.Module):
    """An LSTM, whose kernel saves a workspace that fake tensors do not show."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.lstm(x)[0].square().mean()
        return loss


@pytest.mark.parametrize(("make", "shape"), [(Depthwise, (1, 3, 4, 4)), (Recurrent, (8, 4, 16))])
def test_a_step_that_fits_needs_no_more_than_was_said(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    answer = memplan.fits(model, x, device="cpu", optimizer="SGD", search=False, allowance=0)
    assert answer.unmeasured == 0
    assert memplan.compile(model, x).plan.total <= answer.total
    assert "was measured" in str(answer)


def test_kernels_that_are_not_run_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_scratch, "MOST", 0)
    answer = memplan.fits(Depthwise(), torch.randn(1, 3, 4, 4), device="cpu", search=False)
    assert answer.unmeasured > 0
    assert f"what {answer.unmeasured} of them allocate" in str(answer)


def test_equal_calls_run_once_and_other_kernels_never(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []

    def counted(thunks: Any, device: torch.device) -> list[int]:
        runs.extend(thunks)
        return [0] * len(thunks)

    monkeypatch.setattr(kernel_scratch, "peak_bytes", counted)
    for layers, kinds in ((1, 1), (3, 1), (0, 0)):
        runs.clear()
        model = nn.Sequential(*(nn.Conv2d(4, 4, 3, padding=1) for _ in range(layers)), nn.ReLU())
        memplan.fits(model, torch.randn(1, 4, 8, 8), device="cpu", train=False, search=False)
        assert len(runs) == 3 * kinds, "arguments, kernel, and what is freed"
