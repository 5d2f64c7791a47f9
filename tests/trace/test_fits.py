"""`memplan.fits`: its parts, the plan that fits and its batches, beside real optimizers, plans and kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memplan
from memplan.errors import InvalidModel, InvalidSize, UnsupportedCall, UnsupportedDevice
from memplan.trace.optimizer.update_bytes import update_bytes
from tests.models import Made

WIDTH = 256


class Tied(nn.Module):
    """A loss of two layers with one weight, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu() * self.scale
        loss: torch.Tensor = self.second(hidden).square().mean()
        return loss


def layers(depth: int = 4) -> nn.Module:
    """A network whose activations take more than its parameters at a batch of some thousands."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(depth)))


def parameters(count: int = 6) -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(64, 64)) for _ in range(count)]


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, amsgrad=True),
        torch.optim.Adafactor,
        torch.optim.RMSprop,
    ],
)
def test_state_and_temporaries_are_those_of_the_real_update(make: Callable[[Any], Any], foreach: bool) -> None:
    found = update_bytes(make, parameters(), foreach=foreach)
    real = parameters()
    optimizer = make(real)
    for group in optimizer.param_groups:
        group["foreach"] = foreach
    for p in real:
        p.grad = torch.randn_like(p)
    optimizer.step()
    state = [t for entry in optimizer.state.values() for t in entry.values() if isinstance(t, torch.Tensor)]
    assert found.state == sum(t.nbytes for t in state if t.numel() > 1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        optimizer.step()
    live = peak = 0
    events = profiler.profiler.kineto_results.events() if profiler.profiler else []
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    # Numbers in tensors, whole updates of a kernel's own: within a parameter, and never below.
    assert peak <= found.temporaries + 6 * 64
    assert found.temporaries <= peak + 64 * 64 * 4


def test_parts_are_those_of_the_plan_and_of_the_optimizer() -> None:
    model, x = Tied(), torch.randn(64, WIDTH)
    plan = memplan.plan(model, x)
    answer = memplan.fits(model, x, target="cpu", allowance=0, search=False)
    assert answer.need.beside < answer.need.kept + answer.need.temporaries, "the arena makes room for the update"
    weights = sum(p.nbytes for p in model.parameters())
    assert answer
    assert 0 <= answer.need.parameters - (weights + WIDTH * 4) < 64  # and the constants of the mean
    assert answer.need.state == 2 * weights + 4 * len(list(model.parameters()))  # and each one's number of steps
    assert answer.need.arena == plan.arena_size
    assert answer.need.fixed + answer.need.arena + answer.need.during == plan.total + answer.need.state
    assert answer.total == answer.need.total == answer.need.fixed + answer.need.arena + answer.need.beside
    assert (answer.batch, answer.optimizer, answer.dtypes, answer.largest_batch) == (64, "AdamW", ("float32",), None)
    assert "AdamW" in str(answer)
    assert "fits cpu" in repr(answer)
    whole = memplan.fits(model, x, target="1GiB", search=False).total
    assert memplan.fits(model, x, target=whole, slack=0, search=False)
    assert not memplan.fits(model, x, target=whole - 1, slack=0, search=False)
    plain = memplan.fits(model, x, target="cpu", optimizer="none", search=False, allowance="1MiB")
    assert plain.need.state == plain.need.temporaries == 0
    assert plain.total == plan.total + (1 << 20)
    forward = memplan.fits(model, x, target="cpu", train=False, search=False)
    assert (forward.train, forward.need.state) == (False, 0)


def test_the_largest_batch_is_the_largest_that_fits() -> None:
    model, stages = layers(), list[str]()
    example = torch.randn(32, WIDTH)
    need = memplan.fits(model, example, target="1GiB", search=False).total
    limit = need * 3
    answer = memplan.fits(model, example, target=limit, slack=0, on_progress=stages.append)
    assert answer.largest_batch is not None
    assert answer.largest_batch > 32
    assert any("tracing Sequential" in stage for stage in stages)
    for batch, fits in ((answer.largest_batch, True), (answer.largest_batch + 1, False)):
        assert memplan.fits(model, example, target=limit, slack=0, batch=batch, search=False).fits is fits

    def make(batch: int) -> tuple[nn.Module, torch.Tensor]:
        return model, torch.empty(batch, WIDTH)

    assert memplan.fits(make, target=limit, slack=0, batch=32).largest_batch == answer.largest_batch
    assert memplan.fits(make, target=int(limit / 0.95) + 1, batch=32).largest_batch == answer.largest_batch
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_a_plan_that_fits_is_found_where_the_step_does_not() -> None:
    model, example = layers(), torch.randn(8192, WIDTH)
    whole = memplan.fits(model, example, target="1GiB", search=False)
    assert (whole.within, whole.smallest) == (None, None)
    answer = memplan.fits(model, example, target=int(whole.total * 0.8), slack=0, costs="a100")
    assert not answer
    assert answer.seconds is not None
    assert answer.within is not None
    assert answer.within.eviction is not None
    assert answer.within.eviction.overhead > 0
    assert whole.total * 0.7 < answer.within.total <= answer.capacity.usable
    assert f"budget={answer.capacity.usable}, reserve={answer.need.state}" in str(answer)
    half = memplan.fits(model, example, target="1GiB", dtype="bfloat16", search=False)
    assert half.dtypes == ("bfloat16",)
    assert half.total < 0.51 * whole.total
    assert answer.largest_batch is not None
    assert 8192 * 0.6 < answer.largest_batch < 8192
    tiny = memplan.fits(model, example, target="1MiB", slack=0)
    assert (tiny.within, tiny.largest_batch) == (None, 0)
    assert tiny.smallest is not None
    assert tiny.smallest > 1 << 20
    assert "no plan was found that fits" in str(tiny)


@pytest.mark.parametrize(
    ("options", "error", "what"),
    [
        ({"target": "abacus"}, UnsupportedDevice, "name one of"),
        ({"batch": 0}, InvalidSize, "batch"),
        ({"batch": True}, InvalidSize, "batch"),
        ({"dtype": "int8"}, InvalidSize, "floating-point"),
        ({"dtype": "float99"}, InvalidSize, "floating-point"),
        ({"dtype": torch.int8}, InvalidSize, "floating-point"),
        ({"dtype": 5}, InvalidSize, "floating-point"),
        ({"optimizer": "Adman"}, InvalidModel, "AdamW"),
        ({"optimizer": "LBFGS"}, InvalidModel, "closure"),
        ({"optimizer": lambda p: 3}, InvalidModel, "no torch.optim.Optimizer"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        memplan.fits(nn.Linear(4, 4), torch.ones(2, 4), **{"target": "1MiB", "search": False, **options})


def test_parameters_without_a_gradient_have_no_state() -> None:
    model = Made(lambda m, x: m.used(x), used=nn.Linear(8, 8), unused=nn.Linear(512, 512))

    need = memplan.fits(model, torch.empty(4, 8), target="1GiB", search=False).need
    assert need.state == 2 * (8 * 8 + 8) * 4
    assert need.temporaries < 4096


def test_one_of_several_ranks_has_its_part_of_parameters_state_and_gradients() -> None:
    model, x = layers(8), torch.randn(4, WIDTH)
    one = memplan.fits(model, x, target="6MiB", search=False)
    of_four = memplan.fits(model, x, target="6MiB", search=False, ranks=4)
    assert of_four.need.parameters * 4 == one.need.parameters
    assert of_four.need.gradients * 4 == one.need.gradients
    assert of_four.need.state < one.need.state / 4 + 100  # and a counter of steps for each parameter
    assert of_four.need.temporaries * 4 <= one.need.temporaries + 400
    assert of_four.batch == 4
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("ranks", [0, -1, True, "8"])
def test_what_is_no_number_of_ranks_is_refused(ranks: Any) -> None:
    with pytest.raises(UnsupportedCall, match="no number of ranks"):
        memplan.fits(layers(1), torch.randn(4, WIDTH), target="6MiB", ranks=ranks)


def _depthwise() -> Made:
    """A depthwise convolution, whose backward takes more than its results (oneDNN), and norms."""
    parts = {"stem": nn.Conv2d(3, 32, 3, padding=1), "norm": nn.BatchNorm2d(32)}
    deep = nn.Conv2d(32, 32, 7, padding=3, groups=32)
    return Made(lambda m, x: m.deep(m.norm(m.stem(x))).square().mean(), **parts, deep=deep)


def _recurrent() -> Made:
    """An LSTM, whose kernel saves a workspace that fake tensors do not show."""
    return Made(lambda m, x: m.lstm(x)[0].square().mean(), lstm=nn.LSTM(16, 32))


@pytest.mark.parametrize(("make", "shape"), [(_depthwise, (1, 3, 4, 4)), (_recurrent, (8, 4, 16))])
def test_a_step_that_fits_needs_no_more_than_was_said(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> None:
    model, x = make(), torch.randn(shape)
    answer = memplan.fits(model, x, target="cpu", optimizer="SGD", search=False, allowance=0)
    assert answer.unmeasured == 0
    assert memplan.compile(model, x).plan.total <= answer.total
    assert "was measured" in str(answer)
