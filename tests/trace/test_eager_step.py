"""Tests of what eager needs, found by running a model on fake tensors, and kernels, by running them on zeros."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.devices.measure import peak_bytes
from memplan.trace import kernel_scratch
from memplan.trace.eager_step import eager_step
from memplan.trace.kernel_scratch import KernelScratch, call_of, like_tensor

CPU = torch.device("cpu")
WIDTH = 64


class Holds(nn.Module):
    """A local variable holds what no op needs any more, until the forward returns."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.first(x)
        narrow = self.second(wide.tanh())
        return nn.functional.dropout(narrow, 0.1).square().mean()


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


MODELS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (Holds, (256, WIDTH)),
    (Depthwise, (1, 3, 4, 4)),
    (Recurrent, (8, 4, 16)),
]


@pytest.mark.parametrize(("make", "shape"), MODELS)
def test_eager_allocates_what_is_predicted(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    state, before = torch.get_rng_state(), {name: t.clone() for name, t in model.state_dict().items()}
    found = eager_step(model, (x,), {}, train=True, scratch=KernelScratch())
    assert found is not None
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    def step() -> None:
        model(x).backward()

    def clear() -> None:
        model.zero_grad(set_to_none=True)

    measured = peak_bytes([step, clear, step], CPU)[2]
    assert measured * 0.99 < found.peak < measured * 1.01
    gradients = sum(p.nbytes for p in model.parameters())
    assert gradients <= found.kept <= gradients + 64  # and the loss
    forward = eager_step(model, (x,), {}, train=False, scratch=None)
    assert forward is not None
    assert forward.peak < found.peak


@pytest.mark.parametrize(("make", "shape"), MODELS[1:])
def test_a_step_that_fits_needs_no_more_than_was_said(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    answer = memplan.fits(model, x, device="cpu", optimizer="SGD", search=False, allowance=0)
    assert answer.unmeasured == 0
    assert memplan.compile(model, x).plan.total <= answer.total
    assert "was measured" in str(answer)


def test_a_model_that_reads_numbers_is_predicted_from_its_trace() -> None:
    class Reads(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not torch.compiler.is_compiling():
                float(self.weight.sum())
            return super().forward(x).sum()

    model, x = Reads(8, 8), torch.randn(4, 8)
    assert eager_step(model, (x,), {}, train=True, scratch=None) is None
    assert memplan.fits(model, x, device="1GiB", search=False).eager > 0


def test_kernels_that_are_not_run_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_scratch, "MOST", 0)
    answer = memplan.fits(Depthwise(), torch.randn(1, 3, 4, 4), device="cpu", search=False)
    assert answer.unmeasured > 0
    assert f"what {answer.unmeasured} of them allocate" in str(answer)


def test_equal_calls_run_once_and_other_kernels_never(monkeypatch: pytest.MonkeyPatch) -> None:
    conv, x, weight = torch.ops.aten.convolution.default, torch.randn(1, 4, 8, 8), torch.randn(4, 1, 3, 3)
    arguments = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 4)
    call = call_of(conv, arguments, {}, like_tensor)
    assert call is not None
    assert call == call_of(conv, (torch.zeros_like(x), *arguments[1:]), {}, like_tensor)
    assert call != call_of(conv, (x, x.as_strided(weight.shape, weight.stride()), *arguments[2:]), {}, like_tensor)
    assert call_of(torch.ops.aten.mm.default, (weight, weight), {}, like_tensor) is None
    assert call_of(conv, (torch.empty(0, 4, 8, 8), *arguments[1:]), {}, like_tensor) is None
    runs: list[Any] = []

    def counted(thunks: Any, device: torch.device) -> list[int]:
        runs.append(thunks)
        return [0] * len(thunks)

    monkeypatch.setattr(kernel_scratch, "peak_bytes", counted)
    scratch = KernelScratch()
    scratch.measure([call, call])
    scratch.measure([call])
    assert len(runs) == 1
    assert len(runs[0]) == 3
