"""Tests of what a loss outside of a module is predicted to allocate, beside what it allocates by memory events."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from memplan.runtime.execute.loss_profile import LossProfile, loss_profile
from tests.runtime.allocated import allocations

ROWS, CLASSES = 64, 256
RESULT = ROWS * CLASSES * 4  # bytes
LABELS = torch.arange(ROWS) % CLASSES
TARGET = torch.linspace(0.0, 1.0, ROWS * CLASSES).view(ROWS, CLASSES)
MARK = 7_654_321  # bytes: the backward of a step has begun


class _Step(torch.autograd.Function):
    """A step in the place of a planned one, that looks at its caller when its backward begins."""

    is_planned = True
    found: list[LossProfile]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        torch.empty(MARK, dtype=torch.uint8)
        _Step.found = [*getattr(_Step, "found", []), loss_profile(ctx)]
        return grads[0]


def _step(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Step.apply(x)  # type: ignore[no-untyped-call]
    return made


Loss = Callable[[torch.Tensor], torch.Tensor]
EXACT: dict[str, Loss] = {
    "cross entropy": lambda y: F.cross_entropy(y, LABELS),
    "of each row": lambda y: F.cross_entropy(y, LABELS, reduction="none").mean(),
    "smoothed labels": lambda y: F.cross_entropy(y, LABELS, label_smoothing=0.1),
    "of all rows but one": lambda y: F.cross_entropy(y[:-1].contiguous().view(-1, CLASSES), LABELS[1:]),
    "in double": lambda y: F.cross_entropy(y.double(), LABELS),
    "squares": lambda y: F.mse_loss(y, TARGET),
    "absolute": lambda y: F.l1_loss(y, TARGET),
    "smooth": lambda y: F.smooth_l1_loss(y, TARGET),
    "huber": lambda y: F.huber_loss(y, TARGET),
    "binary": lambda y: F.binary_cross_entropy(y.sigmoid(), TARGET),
    "binary with logits": lambda y: F.binary_cross_entropy_with_logits(y, TARGET),
    "margin": lambda y: F.multi_margin_loss(y, LABELS),
    "power": lambda y: y.pow(2).mean(),
    "mean": lambda y: y.mean(),
    "entropy": lambda y: (y.softmax(-1) * y.log_softmax(-1)).sum(),
}


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("name", list(EXACT))
def test_the_bytes_of_a_loss_are_those_that_it_allocates(name: str, kept: bool) -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    _Step.found = []

    def run() -> None:
        result = [_step(x)]
        EXACT[name](result[0] if kept else result.pop()).backward()  # type: ignore[no-untyped-call]

    allocations(run)
    x.grad = None
    events = allocations(run)
    measured = max(accumulate(events[: events.index(MARK)]))
    predicted = _Step.found[-1].peak([] if kept else [0]) + (RESULT if kept else 0)
    assert predicted == pytest.approx(measured, abs=RESULT / 50)


def test_what_ran_after_another_step_is_that_ones() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    _Step.found = []
    F.mse_loss(_step(_step(x).exp()), TARGET).backward()  # type: ignore[no-untyped-call]
    late, early = (profile.peak([0]) for profile in _Step.found)
    assert late == 3 * RESULT  # the result, its gradient, and the difference on its way
    assert early == 2 * RESULT  # that of `exp`, which it keeps, and its gradient: none of the loss


def test_a_backward_in_another_thread_is_seen_too() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    _Step.found = []
    loss = F.mse_loss(_step(x), TARGET)
    thread = threading.Thread(target=torch.autograd.grad, args=(loss, x))
    thread.start()
    thread.join()
    assert _Step.found[0].peak([0]) == 3 * RESULT


def test_a_step_whose_result_is_the_loss_has_none_outside() -> None:
    x = torch.randn(4, requires_grad=True)
    _Step.found = []
    _step(x).backward(torch.ones(4))  # type: ignore[no-untyped-call]
    assert _Step.found[0].peak([0]) == 0


def test_frames_are_not_kept_alive() -> None:
    """A cycle through a frame would hold gradients until garbage is collected."""
    x = torch.randn(ROWS, CLASSES, requires_grad=True)

    def run() -> None:
        x.grad = None
        F.mse_loss(_step(x), TARGET).backward()  # type: ignore[no-untyped-call]

    allocations(run)
    assert sum(allocations(run)) == 0  # the gradient of the run before is freed, and one is made


def test_what_autograd_has_packed_is_not_unpacked_for_it() -> None:
    """Hooks may copy from the host, or run a part of the model again."""
    x, other = torch.randn(ROWS, CLASSES, requires_grad=True), torch.randn(ROWS, CLASSES, requires_grad=True)
    unpacked: list[tuple[int, ...]] = []

    def unpack(t: torch.Tensor) -> torch.Tensor:
        unpacked.append(tuple(t.shape))
        return t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack):
        (F.mse_loss(_step(x), TARGET) + other.exp().mean()).backward()  # type: ignore[no-untyped-call]
    assert len(unpacked) == 3  # both tensors of the one, and the result of `exp`: once each
