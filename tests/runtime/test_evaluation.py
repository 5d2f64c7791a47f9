"""A module that was compiled in eval mode gives results with gradients where eager's have them."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from tests.slow import slow


def _with_dropout() -> nn.Module:
    """Two layers, with a dropout between them that eval mode leaves out."""
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 3)).eval()


def _gradients(model: nn.Module, call: Callable[..., torch.Tensor], *batches: torch.Tensor) -> list[torch.Tensor]:
    """Of a loss with a term for each batch, all of whose results are alive together."""
    model.zero_grad()
    sum(call(x).square().sum() for x in batches).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    "options", [{}, slow({"dynamic_shapes": ({0: Dim("n", min=2, max=64)},)})], ids=["one", "varying"]
)
def test_a_term_of_a_loss_keeps_its_gradient(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = _with_dropout()
    eager = copy.deepcopy(model)
    x = torch.randn(5, 6)
    compiled = memplan.compile(model, x, sanitize="poison", **options)
    for batches in ([x], [torch.randn(5, 6)], [torch.randn(5, 6) for _ in range(3)]):
        ours, theirs = _gradients(model, compiled, *batches), _gradients(eager, eager, *batches)
        assert len(ours) == len(theirs) == 4
        assert all(map(torch.equal, ours, theirs))


def test_a_loop_that_keeps_its_results_runs(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = _with_dropout()
    compiled, batches = memplan.compile(model, torch.randn(5, 6)), [torch.randn(5, 6) for _ in range(4)]
    with caplog.at_level(logging.WARNING, "memplan"):
        kept = [compiled(x) for x in batches]
        with torch.no_grad():
            assert torch.equal(compiled(batches[0]), model(batches[0])), "while these wait for their backward"
    assert all(torch.equal(y, model(x)) and y.grad_fn is not None for x, y in zip(batches, kept, strict=True))
    said = [r.getMessage() for r in caplog.records if r.name == "memplan"]
    assert [text.count("runs eagerly") for text in said] == [1], "said once"
    sum(y.sum() for y in kept).backward()
    with torch.no_grad():
        assert compiled._calls.selector.select((batches[0],), {})[0] is compiled._calls.selector.main


def test_nothing_is_recorded_that_eager_does_not_record() -> None:
    x = torch.randn(5, 6)
    frozen = memplan.compile(_with_dropout().requires_grad_(False), x)
    assert not frozen(x).requires_grad
    assert not frozen._calls.selector._runners, "no program beside the planned one"
    assert frozen(x.clone().requires_grad_()).requires_grad
    asked = memplan.compile(_with_dropout(), x, train=False)
    assert not asked(x).requires_grad, "train=False asks for that"


def test_where_the_backward_cannot_be_planned_the_call_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _with_dropout(), torch.randn(512, 6)
    budget = memplan.compile(model, x, train=False).plan.arena_size + 64
    compiled = memplan.compile(model, x, arena_budget=budget)
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))
    with caplog.at_level(logging.WARNING, "memplan"):
        y = compiled(x)
    assert y.grad_fn is not None
    assert torch.equal(y, model(x))
    assert "cannot be planned with its backward" in caplog.text
