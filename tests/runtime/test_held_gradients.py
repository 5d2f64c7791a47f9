"""Tests of gradients of outputs: their bytes are freed once the backward has read them, if nothing else has them."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memplan
from benchmarks.peak_measure import live_bytes
from memplan.runtime.copies import copy_threads
from memplan.runtime.execute import held_gradients
from tests.runtime.allocated import allocations
from tests.slow import slow

Loss = Callable[[torch.Tensor, torch.Tensor, list[Any]], torch.Tensor]


class Widens(nn.Module):
    """Its last result is large, and its backward needs most when it has read the gradient of that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.last(torch.relu(self.first(x)))
        return result


def _loss(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    return nn.functional.mse_loss(y, target)


def _hook_keeps_it(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    y.register_hook(kept.append)  # type: ignore[no-untyped-call]
    return _loss(y, target, kept)


def _hook_keeps_a_view(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    y.register_hook(lambda g: kept.append(g.detach()[:1]))  # type: ignore[no-untyped-call]
    return _loss(y, target, kept)


def _hook_keeps_an_array(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    y.register_hook(lambda g: kept.append(g.numpy()))  # type: ignore[no-untyped-call]
    return _loss(y, target, kept)


def _hook_keeps_the_storage(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    y.register_hook(lambda g: kept.append(g.untyped_storage()))  # type: ignore[no-untyped-call]
    return _loss(y, target, kept)


def _is_retained(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    y.retain_grad()
    kept.append(y)
    return _loss(y, target, kept)


def _is_that_of_a_leaf_too(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    leaf = torch.zeros_like(y, requires_grad=True)
    kept.append(leaf)
    return _loss(y + leaf, target, kept)


def _is_that_of_a_view_too(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    leaf = torch.zeros(y.numel(), requires_grad=True)
    kept.append(leaf)
    return _loss(y + leaf.view(y.shape), target, kept)


def _hook_keeps_the_base_of_a_view(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    flat = y.view(-1)
    flat.register_hook(kept.append)  # type: ignore[no-untyped-call]
    return nn.functional.mse_loss(flat, target.view(-1))


def _hook_keeps_another_view(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    flat = y.view(-1)
    flat.register_hook(lambda g: kept.append(g.view(2, -1)))  # type: ignore[no-untyped-call]
    return nn.functional.mse_loss(flat, target.view(-1))


def _post_hook_keeps_it(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    assert y.grad_fn is not None
    y.grad_fn.register_hook(lambda _, grads: kept.append(grads[0]))
    return _loss(y, target, kept)


LOSSES = [
    _loss,
    _hook_keeps_it,
    _hook_keeps_a_view,
    _hook_keeps_an_array,
    _hook_keeps_the_storage,
    _is_retained,
    _is_that_of_a_leaf_too,
    _is_that_of_a_view_too,
    _hook_keeps_the_base_of_a_view,
    _hook_keeps_another_view,
    _post_hook_keeps_it,
]


def _numbers(kept: list[Any]) -> list[torch.Tensor]:
    """Return copies of what a loss has kept, and of the gradients of that."""
    bytes_of = torch.empty(0, dtype=torch.uint8)
    tensors = [bytes_of.set_(one) if isinstance(one, torch.UntypedStorage) else torch.as_tensor(one) for one in kept]
    grads = [t.grad for t in tensors if t.requires_grad and t.grad is not None]
    return [t.detach().clone() for t in (*tensors, *grads)]


def _assert_same_gradients(one: nn.Module, two: nn.Module) -> None:
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def _each_way() -> list[Any]:
    """Each loss with each way; only the default is always fast, and of the others one, in turns."""
    ways = ("auto", "added", "safe")
    return [
        (loss, way) if k in (0, 1 + i % 2) else slow(loss, way)
        for i, loss in enumerate(LOSSES)
        for k, way in enumerate(ways)
    ]


@pytest.mark.parametrize(("loss", "gradients"), _each_way())
def test_whatever_else_has_a_gradient_keeps_its_numbers(loss: Loss, gradients: Any) -> None:
    torch.manual_seed(0)
    model, x, target = Widens(), torch.randn(2, 8, 12, 12), torch.randn(2, 8, 12, 12)
    expected = copy.deepcopy(model)
    compiled = memplan.compile(model, x, gradients=gradients)
    for _ in range(2):
        found: list[list[torch.Tensor]] = []
        for called in (compiled, expected):
            kept: list[Any] = []
            called.zero_grad()
            loss(called(x), target, kept).backward()  # type: ignore[no-untyped-call]
            found.append(_numbers(kept))
        assert len(found[0]) == len(found[1])
        assert all(map(torch.equal, *found))
        _assert_same_gradients(model, expected)


def test_a_gradient_that_the_caller_passes_stays() -> None:
    torch.manual_seed(0)
    model, x = Widens(), torch.randn(2, 8, 12, 12)
    compiled = memplan.compile(model, x)
    given = torch.randn(2, 8, 12, 12)
    was = given.clone()
    compiled(x).backward(given)
    assert torch.equal(given, was)
    model.zero_grad()
    y = compiled(x)
    (one, _) = torch.autograd.grad(y.square().sum(), [y, model.first.weight])
    assert torch.equal(one, 2 * y)


def test_what_autograd_alone_holds_is_known_in_this_build_of_torch() -> None:
    one, view = held_gradients._counts_alone()
    assert len(view) > len(one)


class _Keeps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the results of all ops, as a debugger does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.kept: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.kept.append(func(*args, **(kwargs or {})))
        return self.kept[-1]


def test_what_a_mode_holds_while_references_are_counted_first_is_not_taken_for_autograds() -> None:
    expected = held_gradients._counts_alone()
    held_gradients._counts_alone.cache_clear()
    with _Keeps() as mode:
        assert held_gradients._counts_alone() == expected
        torch.ones(2)
    assert mode.kept


def _flat_loss(y: torch.Tensor, target: torch.Tensor, kept: list[Any]) -> torch.Tensor:
    return nn.functional.mse_loss(y.view(-1), target.view(-1))


def _peak(called: Any, model: nn.Module, x: torch.Tensor, target: torch.Tensor, loss: Loss) -> int:
    """Return the most bytes that are alive in a step, with all that was before."""

    def step() -> None:
        model.zero_grad()
        loss(called(x), target, []).backward()  # type: ignore[no-untyped-call]

    for _ in range(2):
        step()
    allocations(step)
    gc.collect()
    standing = live_bytes()
    return standing + max(accumulate(allocations(step)))


@pytest.mark.parametrize("loss", [_loss, _flat_loss])
def test_the_gradient_of_a_large_output_is_gone_when_the_backward_needs_most(loss: Loss) -> None:
    torch.manual_seed(0)
    model, x, target = Widens(), torch.randn(2, 8, 48, 48), torch.randn(2, 8, 48, 48)
    eager = _peak(model, model, x, target, loss)
    compiled = memplan.compile(model, x)
    assert _peak(compiled, model, x, target, loss) <= eager + compiled.plan.padding


def test_what_a_copy_to_the_device_reads_stays_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model, x, target = Widens(), torch.randn(8, 8, 96, 96), torch.randn(8, 8, 96, 96)
    expected = copy.deepcopy(model)
    compiled = memplan.compile(model, x, device="cpu")  # the gradient of its result comes from the host
    freed: list[int] = []
    monkeypatch.setattr(copy_threads, "_move", _late(copy_threads._move, freed))
    for called in (compiled, expected):
        _loss(called(x), target, []).backward()  # type: ignore[no-untyped-call]
    assert not freed
    _assert_same_gradients(model, expected)


def _late(move: Callable[..., None], freed: list[int]) -> Callable[..., None]:
    """Return `move` as a slow link runs it, which notes the size of what was freed before it was read."""

    def moved(destination: torch.Tensor, source: torch.Tensor, before: Any) -> None:
        time.sleep(0.05)
        if source.untyped_storage().nbytes() < source.nbytes:
            freed.append(source.nbytes)
        else:
            move(destination, source, before)

    return moved
