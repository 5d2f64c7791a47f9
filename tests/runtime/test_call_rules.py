"""Rules that keep a call from being silently wrong, each by a call that only this rule catches."""

from __future__ import annotations

import copy
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.core.choices import Gradients
from memplan.errors import InputMismatch, StaleActivationsError
from memplan.runtime.memory.arena_ownership import ArenaOwnership


def _grad(p: torch.Tensor) -> torch.Tensor:
    assert p.grad is not None
    return p.grad


def test_planning_anew_between_forward_and_backward_leaves_the_activations_alone() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh())
    eager, x = copy.deepcopy(model), torch.randn(64, 4)
    compiled = memplan.compile(model, x, on_mismatch="replan")
    y = compiled(x)
    compiled(torch.randn(48, 4))  # which would fit in the same arena
    y.square().sum().backward()
    eager(x).square().sum().backward()
    assert all(torch.equal(_grad(p), _grad(q)) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


class Writes(nn.Module):
    """Changes its first input, and then reads its second."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return y * 2


@pytest.mark.parametrize("transposed", [False, True], ids=["alike", "laid out anew"])
def test_inputs_that_became_one_memory_raise(*, transposed: bool) -> None:
    torch.manual_seed(0)
    compiled = memplan.compile(Writes(), (torch.randn(3, 3), torch.randn(3, 3)), train=False, on_mismatch="error")
    x = torch.randn(3, 3)
    before = x.clone()
    with pytest.raises(InputMismatch, match="do not share memory as those"):
        compiled(x, x.t() if transposed else x.detach())
    assert torch.equal(x, before), "nothing ran"
    other = torch.randn(3, 3)
    assert torch.equal(compiled(x, other.t()), other.t() * 2)


def test_inputs_that_were_one_memory_and_are_two_raise() -> None:
    class Adds(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    x = torch.randn(3, 3)
    compiled = memplan.compile(Adds(), (x, x.detach()), train=False, on_mismatch="error")
    assert torch.equal(compiled(x, x.detach()), x + x)
    with pytest.raises(InputMismatch, match="do not share memory as those"):
        compiled(x, x.clone())


class Sums(nn.Module):
    """Two parameters whose gradients are one tensor, as AOTAutograd hands them out."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.a + self.b).sin()


@pytest.mark.parametrize("gradients", ["outside", "arena"])
def test_two_gradients_have_bytes_of_their_own(gradients: Gradients) -> None:
    torch.manual_seed(0)
    model, x = Sums(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    for net, call in ((model, memplan.compile(model, x, gradients=gradients)), (eager, eager)):
        call(x).sum().backward()
        _grad(net.a).mul_(3)
    assert torch.equal(_grad(model.b), _grad(eager.b))
    assert _grad(model.a).untyped_storage().data_ptr() != _grad(model.b).untyped_storage().data_ptr()


def test_untied_parameters_raise() -> None:
    torch.manual_seed(0)
    flat = torch.randn(16)

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(flat.view(4, 4)), nn.Parameter(flat.view(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.a @ self.b

    net = Shares()
    compiled = memplan.compile(net, torch.randn(2, 4), on_mismatch="error")
    net.b.data = torch.randn(4, 4)
    with pytest.raises(InputMismatch, match="do not share memory as they did"):
        compiled(torch.randn(2, 4))


class Window(nn.Module):
    """A view of its input, and a result of its own."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[1:3], x * 2


def test_views_of_inputs_that_are_slices() -> None:
    big = torch.arange(40.0).view(10, 4)
    compiled = memplan.compile(Window(), big[2:7], train=False)
    for start in (2, 0, 5):
        x = big[start : start + 5]
        view, twice = compiled(x)
        assert torch.equal(view, x[1:3])
        assert view.data_ptr() == x[1].data_ptr()
        assert torch.equal(twice, x * 2)


class Bits(nn.Module):
    """Reads the bits of a buffer as whole numbers of another size."""

    bits: torch.Tensor

    def __init__(self, bits: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("bits", bits)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bits.view(torch.int16)


def test_a_buffer_of_another_type_that_moves_within_its_memory() -> None:
    torch.manual_seed(0)
    big, x = torch.randn(12), torch.zeros(6, dtype=torch.int16)
    model = Bits(big[:3])
    compiled = memplan.compile(model, x, train=False)
    for start in (0, 1, 5):
        model.bits = big[start : start + 3]
        assert torch.equal(compiled(x), big[start : start + 3].view(torch.int16))


class Straight(torch.autograd.Function):
    """Has one gradient, whatever comes in."""

    @staticmethod
    def forward(ctx: Any, w: torch.Tensor) -> torch.Tensor:
        return w.round()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return torch.full((4,), 3.0)


class Two(nn.Module):
    """Two results, and a parameter whose gradient depends on none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rounded: torch.Tensor = Straight.apply(self.w)  # type: ignore[no-untyped-call]
        return x * rounded, x * self.v


def test_a_gradient_that_depends_on_nothing_comes_although_another_is_missing() -> None:
    torch.manual_seed(0)
    model, x = Two(), torch.randn(4)
    eager = copy.deepcopy(model)
    for net, call in ((model, memplan.compile(model, x)), (eager, eager)):
        call(x)[0].sum().backward()
        assert net.v.grad is None
        assert torch.equal(_grad(net.w), torch.full((4,), 3.0))


def test_an_output_that_the_backward_needs_does_not_keep_its_step_alive() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(3, 4)
    compiled = memplan.compile(model, x)
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            y: Any = compiled(x)
            assert compiled._calls.arena.ownership.pending is not None
            del y
            assert compiled._calls.arena.ownership.pending is None
    finally:
        gc.enable()


def test_a_step_that_was_given_up_is_drained_before_the_next() -> None:
    """Its copies may be under way still, and would write into what the next one keeps there."""
    calls: list[str] = []
    ownership = ArenaOwnership(lambda: calls.append("drain"), lambda: calls.append("turn"))
    ownership.left = SimpleNamespace(clear=lambda: calls.append("move out"))
    with ownership:
        step = ownership.begin(keep=True)
    assert calls == ["move out", "drain", "turn"]
    with (
        ownership,
        pytest.raises(StaleActivationsError, match="forward 2 would overwrite the activations of forward 1"),
    ):
        ownership.begin(keep=False)
    assert calls == ["move out", "drain", "turn"], "nothing is disturbed while it waits"
    del step
    with ownership:
        ownership.begin(keep=False)
    assert calls[3:] == ["drain", "turn"]
    with ownership:
        step = ownership.begin(keep=True)
        ownership.end(step)
        assert calls[5:] == ["drain", "turn", "turn"], "a backward takes its turn too"
        with pytest.raises(StaleActivationsError, match="backward ran twice for forward 4"):
            ownership.end(step)
    assert ownership.pending is None
    with ownership:
        kept = ownership.begin(keep=False)
        assert kept is not None
        assert ownership.pending is None, "no backward follows, whoever holds the step"
        with pytest.raises(StaleActivationsError, match="the activations of forward 5 were overwritten by forward 5"):
            ownership.end(kept)
    calls.clear()
    with pytest.raises(KeyError), ownership:
        raise KeyError
    assert calls == ["drain"], "and the arena is free again"
    with ownership, pytest.raises(StaleActivationsError, match="another thread"), ownership:
        pass


class Counts(nn.Module):
    """Adds its input to a buffer."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return x * 2


def test_autograd_knows_of_buffers_that_a_call_without_gradients_has_changed() -> None:
    model = Counts()
    compiled = memplan.compile(model, torch.ones(4), train=False)
    product = torch.ones(4, requires_grad=True) * model.total
    compiled(torch.ones(4))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.backward(product.sum())


def test_an_input_in_the_memory_of_a_buffer_that_has_moved_raises() -> None:
    model = Counts()
    compiled = memplan.compile(model, torch.ones(4), train=False, on_mismatch="error")
    model.total = torch.zeros(4)
    compiled(torch.ones(4))
    with pytest.raises(InputMismatch, match=r"input 0: shares its memory with the buffer 'total'"):
        compiled(model.total)
    assert torch.equal(model.total, torch.ones(4))
