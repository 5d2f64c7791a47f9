"""Which results are one tensor, an input or a view of another result: as eager has it, and so are bits and writes."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import memplan
from tests.models import Made
from tests.steps import Training, sgd


def _parts() -> dict[str, Any]:
    return {"a": nn.Linear(16, 16), "b": nn.Linear(16, 16), "count": torch.arange(16.0)}


CASES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "a result twice": lambda m, x: (y := m.a(x), y),
    "a result in containers": lambda m, x: {"p": (y := m.a(x)), "q": [y, (y, m.b(x), None)]},
    "a result twice, saved": lambda m, x: (y := m.a(x).relu(), m.b(y), y),
    "the same by another name": lambda m, x: (y := m.a(x), y.contiguous(), y.float()),
    "an input twice": lambda m, x: (x, m.a(x), x),
    "views of an input": lambda m, x: (m.a(x), v := x[:2], v[:, 1:], v, x.detach()),
    "parameters and views": lambda m, x: (m.a(x), m.b.weight, m.b.weight, m.b.weight.t()),
    "a buffer that is changed": lambda m, x: (m.count.add_(1), m.a(x), m.count, m.count[2:], m.count)[1:],
    "the whole and a slice": lambda m, x: (y := m.a(x.view(2, 3, 16)), y[:, 1:]),
    "several slices and the whole": lambda m, x: (y := m.a(x.view(2, 3, 16)), y[:, 1:], y[0], y[1]),
    "slices in another order": lambda m, x: ((y := m.a(x), v := y[1:], w := y[:, 3:]), w, v)[::-1],
    "a view of a view": lambda m, x: (y := m.a(x), v := y[1:], v.t(), y.unsqueeze(0)),
    "equal views": lambda m, x: (y := m.a(x), y.view_as(y), y.view(-1), y.view(-1)),
    "a detached result": lambda m, x: (y := m.a(x), d := y.detach(), d, y[1:].detach()),
    "views of what is used": lambda m, x: ((y := m.a(x.view(2, 3, 16)))[:, 1:], y, m.b(y)),
    "overlapping pieces": lambda m, x: (*(y := m.a(x)).split([3, 13], 1), y.unbind()[2], y.unbind()[4]),
}
# Results that the model computes further with: their gradients, and the order of the sums, are those of aot_eager.
USED = {"a result twice, saved", "views of what is used"}
MODES = ["train", "eval", "no_grad"]
# For programs of several graphs and whole steps, which take their results from the same place.
SOME = ["a result in containers", "views of an input", "a buffer that is changed", "views of what is used"]


def _relations(results: list[Any], model: nn.Module, x: torch.Tensor) -> list[Any]:
    """For each result: the first tensor that it is, whose storage it has, and of whose views it is one."""
    known: list[torch.Tensor] = [x, *model.parameters(), *model.buffers()]
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    count, found = len(known), []
    for t in tensors:
        is_one = next((i for i, k in enumerate(known) if k is t), None)
        stored = next(
            (i for i, k in enumerate(known) if k.untyped_storage()._cdata == t.untyped_storage()._cdata), None
        )
        base = next((i for i, k in enumerate([*known[:count], *tensors]) if k is t._base), None)
        if base is not None and base >= count and not torch.is_grad_enabled():
            base = None  # nothing depends on it: in eager it may be a tensor that nobody has
        found.append((is_one, stored, base, t.requires_grad, t.is_leaf, t.shape, t.stride()))
        known.append(t)
    return found


def _observed(call: Callable[[torch.Tensor], Any], model: nn.Module, x: torch.Tensor, *, mode: str) -> list[Any]:
    """Return all that a caller sees of a call: relations, values after a write to each result, gradients."""
    start = copy.deepcopy(model.state_dict())
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        seen: list[Any] = [_relations(pytree.tree_leaves(call(x)), model, x)]
    if mode != "no_grad":
        results = [r for r in pytree.tree_leaves(call(x)) if isinstance(r, torch.Tensor)]
        kept = [r for r in results if r.requires_grad and not r.is_leaf]
        for r in kept:
            r.retain_grad()
        weighed = [(i + 1) / 3 * (r.sin() * torch.linspace(0.3, 1.7, r.shape[-1])).sum() for i, r in enumerate(results)]
        torch.autograd.backward(torch.stack(weighed).sum())
        seen.append([r.grad for r in kept])
        seen += [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
        seen.append(None if x.grad is None else x.grad.clone())
        model.zero_grad()
        x.grad = None
    for i in range(len(seen[0])):
        with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
            results = [r for r in pytree.tree_leaves(call(x)) if isinstance(r, torch.Tensor)]
        before = x.detach().clone()
        results[i].detach().mul_(2)
        seen += [r.detach().clone() for r in results]
        x.detach().copy_(before)
        model.load_state_dict(start)
    return seen


def _same(one: Any, two: Any) -> bool:
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(_same, one, two))
    return torch.equal(one, two) if isinstance(one, torch.Tensor) and isinstance(two, torch.Tensor) else one == two


@pytest.mark.parametrize("wants", [False, True], ids=["plain input", "input with a gradient"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_results_alias_as_in_eager(name: str, mode: str, wants: bool) -> None:
    torch.manual_seed(0)
    model = Made(CASES[name], **_parts()).train(mode == "train")
    x = torch.randn(6, 16).requires_grad_(wants)
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        compiled = memplan.compile(copy.deepcopy(model), (x,))
    _compare(name, model, compiled, x, mode=mode)


def _compare(name: str, model: nn.Module, compiled: nn.Module, x: torch.Tensor, *, mode: str) -> None:
    expected = _observed(model, model, x, mode=mode)
    found = _observed(compiled, compiled, x, mode=mode)
    if name in USED and mode != "no_grad":
        aot: Any = torch.compile(copy.deepcopy(model), backend="aot_eager")
        gradients = slice(1, 3 + len(list(model.parameters())))
        expected[gradients] = _observed(aot, aot, x, mode=mode)[gradients]
    assert len(expected) == len(found)
    for i, (one, two) in enumerate(zip(expected, found, strict=True)):
        assert _same(one, two), f"observation {i}: {one} {two}"


class Broken(Made):
    """Returns the same after a graph break."""

    def forward(self, *inputs: Any) -> Any:
        """Depend on data before the results are made."""
        return None if inputs[0].detach().sum() > 1e9 else self.function(self, *inputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", SOME)
def test_results_alias_as_in_eager_after_a_graph_break(name: str, mode: str) -> None:
    torch.manual_seed(0)
    model = Broken(CASES[name], **_parts()).train(mode == "train")
    x = torch.randn(6, 16)
    with torch.no_grad() if mode == "no_grad" else contextlib.nullcontext():
        compiled = memplan.compile(copy.deepcopy(model), (x,))
    _compare(name, model, compiled, x, mode=mode)


@pytest.mark.parametrize("name", SOME)
def test_results_alias_as_in_eager_in_a_whole_step(name: str) -> None:
    torch.manual_seed(0)
    model, x = Made(CASES[name], **_parts()), torch.randn(6, 16)

    def loss_of(results: Any) -> torch.Tensor:
        tensors = [r for r in pytree.tree_leaves(results) if isinstance(r, torch.Tensor)]
        weighed = [(i + 1) / 3 * (r.sin() * torch.linspace(0.3, 1.7, r.shape[-1])).sum() for i, r in enumerate(tensors)]
        return torch.stack(weighed).sum()

    training = Training(model, sgd, loss_of, x)
    for _ in range(2):
        training.both(x)
