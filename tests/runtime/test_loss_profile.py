"""Tests of what a loss outside of a module is predicted to allocate, beside what it allocates by memory events."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import memplan
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


class _Squares(torch.autograd.Function):
    """A loss of the user's own, that keeps what it takes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return x * grads[0]


def _squares(x: torch.Tensor) -> torch.Tensor:
    made: torch.Tensor = _Squares.apply(x)  # type: ignore[no-untyped-call]
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


def test_a_function_of_the_users_own_is_taken_to_keep_all() -> None:
    x = torch.randn(ROWS, CLASSES, requires_grad=True)
    _Step.found = []
    _squares(_step(x)).sum().backward()  # type: ignore[no-untyped-call]
    assert _Step.found[0].peak([0]) == 3 * RESULT  # what it takes, its result, and its gradient


OTHER: dict[str, Loss] = {
    "own function": lambda y: _squares(y).sum(),
    "checkpoint": lambda y: checkpoint(lambda z: z.exp().sin().sum(), y, use_reentrant=False),
    "reentrant checkpoint": lambda y: checkpoint(lambda z: z.exp().sin(), y, use_reentrant=True).sum(),
    "compiled": torch.compile(lambda z: z.exp().sin().sum(), backend="aot_eager"),
    "sparse": lambda y: (y.to_sparse().to_dense() * 2).sum(),
    "used twice": lambda y: y.sin().sum() + y.cos().mean(),
}


@pytest.mark.parametrize("name", list(OTHER))
def test_losses_of_any_kind_have_eagers_gradients(name: str) -> None:
    torch._dynamo.reset()
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8)), torch.randn(4, 8)
    OTHER[name](model(x)).backward()  # type: ignore[no-untyped-call]
    expected = [p.grad for p in model.parameters()]
    model.zero_grad()
    OTHER[name](memplan.compile(model, x)(x)).backward()  # type: ignore[no-untyped-call]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        assert gradient is not None
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def test_a_graph_that_cannot_be_read_changes_no_backward(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: object) -> LossProfile:
        raise ValueError("a node of another kind")

    monkeypatch.setattr("memplan.runtime.execute.caller_observer.loss_profile", fails)
    model, x = torch.nn.Linear(8, 8), torch.randn(4, 8)
    compiled = memplan.compile(model, x)
    with caplog.at_level(logging.DEBUG, logger="memplan"):
        compiled(x).square().mean().backward()
    assert model.weight.grad is not None
    assert "a node of another kind" in caplog.text


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
