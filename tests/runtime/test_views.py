"""Results that are views: of inputs, of parameters, and pieces of one tensor, as `chunk` and `unbind` return them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch, StaleActivationsError
from tests.models import Made

_Forward = Callable[[torch.Tensor, torch.Tensor], Any]


def _weighted(function: _Forward) -> Any:
    """What a function makes of an input and a parameter of the same shape."""
    return Made(lambda m, x: function(x, m.w), w=nn.Parameter(torch.randn(4, 6)))


VIEWS: dict[str, _Forward] = {
    "pieces of a parameter": lambda x, w: w.chunk(2),
    "pieces of both": lambda x, w: (*torch.split(x, [1, 3]), *torch.split(w, [2, 4], 1), x * w),
    "columns of a result": lambda x, w: torch.sigmoid(x * w).unbind(1),
    "uneven pieces": lambda x, w: torch.split(x * w, [1, 2, 1]),
    "unsafe pieces": lambda x, w: torch.unsafe_chunk(x * w, 3, 1),
    "pieces, one of them twice": lambda x, w: ((y := (x * w).chunk(2))[0], y[1], y[0]),
    "pieces and the whole": lambda x, w: (*(y := x * w).chunk(2), y),
    "a transposed parameter's rows": lambda x, w: w.t().unbind(0),
}


def _results(model: Any, x: torch.Tensor, w: nn.Parameter) -> tuple[list[torch.Tensor], list[torch.Tensor | None]]:
    """Results of one call, and the gradients of the input and the parameter of a loss that weighs each differently."""
    x, w.grad = x.detach().clone().requires_grad_(), None
    results = list(model(x))
    loss = torch.stack([(i + 1) * (t * t).sum() for i, t in enumerate(results)]).sum()
    torch.autograd.backward(loss)
    return results, [None if g is None else g.clone() for g in (x.grad, w.grad)]


@pytest.mark.parametrize("name", VIEWS)
def test_views_and_pieces_are_eagers(name: str) -> None:
    model, x = _weighted(VIEWS[name]), torch.randn(4, 6)
    compiled = memplan.compile(model, x.clone().requires_grad_(), sanitize="poison")
    for _ in range(2):
        x = torch.randn(4, 6)
        theirs, their_gradients = _results(model, x, model.w)
        ours, our_gradients = _results(compiled, x, model.w)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a, b)
            assert (a.stride(), a.requires_grad) == (b.stride(), b.requires_grad)
        for g, h in zip(our_gradients, their_gradients, strict=True):
            assert (g is None) == (h is None)
            if "twice" in name:  # eager adds all terms of one tensor in a row
                torch.testing.assert_close(g, h)
            else:
                assert g is None or (h is not None and torch.equal(g, h))


@pytest.mark.parametrize("view", [lambda y: y[:, 1], lambda y: y.unbind(0)[0], lambda y: y.chunk(2)[1]])
def test_to_change_a_view_of_what_the_backward_needs_raises(view: Any) -> None:
    def forward(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (view(torch.sigmoid(x * w)),)

    model, x = _weighted(forward), torch.randn(4, 6)
    compiled = memplan.compile(model, x)
    (changed,) = compiled(x)
    with torch.no_grad():
        changed.mul_(2)
    with pytest.raises(StaleActivationsError, match="changed in place"):
        changed.sum().backward()
    (kept,) = compiled(x)
    kept.sum().backward()
    assert model.w.grad is not None


def test_views_of_an_input_that_is_laid_out_otherwise_are_eagers() -> None:
    """They have eager's strides and share the input's bytes; such a call gets a program of its own."""
    model = _weighted(lambda x, w: (*torch.split(x, 2), *x.unbind(0), x, (x * w).sum()))
    compiled = memplan.compile(model, torch.randn(4, 6))
    for x in (torch.randn(1, 6).expand(4, 6), torch.randn(6, 4).t(), torch.randn(4, 6)):
        ours, theirs = compiled(x), model(x)
        assert [view.stride() for view in ours] == [view.stride() for view in theirs]
        assert [view.data_ptr() for view in ours[:-1]] == [view.data_ptr() for view in theirs[:-1]]
        assert all(map(torch.equal, ours, theirs))
    strict = memplan.compile(model, torch.randn(4, 6), on_mismatch="error")
    with pytest.raises(InputMismatch, match=r"has strides \(1, 4\).* returns a view of it"):
        strict(torch.randn(6, 4).t())
    copied = memplan.compile(_weighted(lambda x, w: (x * w).sum()), torch.randn(4, 6), on_mismatch="error")
    copied(torch.randn(6, 4).t()).backward()
