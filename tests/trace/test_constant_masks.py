"""Attention masks that depend on constants alone: dropped where they hide nothing, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

import memplan
from memplan.trace.tracing import capture_call
from tests.models import Made
from tests.steps import outcome_of

Mask = Callable[[torch.Tensor], torch.Tensor | None]
LENGTH = 12


def _attention(mask: Mask) -> Made:
    """One attention with a mask that is made while the model runs."""

    def attend(m: Any, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (part.unflatten(-1, (2, 4)).transpose(1, 2) for part in m.project(x).chunk(3, -1))
        return scaled_dot_product_attention(query, key, value, attn_mask=mask(x), dropout_p=0.0)

    return Made(attend, project=nn.Linear(8, 24))


def _all_true(x: torch.Tensor) -> torch.Tensor:
    kept = torch.ones(x.shape[0], LENGTH, dtype=torch.long, device=x.device)
    return kept[:, None, None, :].expand(x.shape[0], 1, LENGTH, LENGTH).to(torch.bool)


def _triangle(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(LENGTH, device=x.device)
    return (at[None, :] <= at[:, None]).expand(x.shape[0], 1, LENGTH, LENGTH)


def _window(x: torch.Tensor) -> torch.Tensor:
    at = torch.arange(LENGTH, device=x.device)
    return (at[None, :] <= at[:, None]) & (at[None, :] > at[:, None] - 4)


def _of_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.zeros(LENGTH, LENGTH, device=x.device)


def _of_the_input(x: torch.Tensor) -> torch.Tensor:
    return (x[:, None, :, 0] < 1e6)[:, :, None, :].expand(x.shape[0], 1, LENGTH, LENGTH)


def _random(x: torch.Tensor) -> torch.Tensor:
    return torch.rand(LENGTH, LENGTH, device=x.device) < 2.0


def _masked(mask: Mask, x: torch.Tensor) -> bool:
    """Return whether the captured attention takes a mask."""
    graph = capture_call(_attention(mask), (x,)).captured.graph_module.graph
    (attention,) = [n for n in graph.nodes if "attention" in str(n.target) and "backward" not in str(n.target)]
    return any(
        len(n.meta["val"].shape) and n.meta["val"].shape[-2:] == (LENGTH, LENGTH) for n in attention.all_input_nodes
    )


@pytest.mark.parametrize(
    ("mask", "stays"),
    [
        *((mask, False) for mask in (_all_true, _triangle)),
        *((mask, True) for mask in (_window, _of_numbers, _of_the_input, _random)),
    ],
)
def test_a_mask_stays_unless_it_is_constant_and_hides_nothing_or_the_future(mask: Mask, stays: bool) -> None:
    assert _masked(mask, torch.randn(2, LENGTH, 8)) is stays


@pytest.mark.parametrize("how", ["compile", "backend"])
@pytest.mark.parametrize("mask", [_all_true, _triangle, _window, _of_numbers, _of_the_input])
def test_attention_has_eagers_bits(mask: Mask, how: str) -> None:
    torch.manual_seed(0)
    model, x = _attention(mask), torch.randn(2, LENGTH, 8)
    compiled = memplan.compile(model, x) if how == "compile" else torch.compile(model, backend=memplan.Backend())
    eager, ours = (outcome_of(model, lambda x, call=call: call(x).square().sum(), x) for call in (model, compiled))
    assert torch.equal(compiled(x), model(x))
    assert ours.same_as(eager)


def _written(write: Callable[[torch.Tensor], object]) -> Mask:
    def mask(x: torch.Tensor) -> torch.Tensor:
        made = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=x.device)
        write(made)
        return made

    return mask


def _of_a_view(made: torch.Tensor) -> None:
    made[0].view(-1)[1:] = False


def _by_out(made: torch.Tensor) -> None:
    torch.logical_and(made, torch.ones_like(made).tril(), out=made)


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "a method": lambda made: made.tril_(),
    "a part": lambda made: made[:, 1:].fill_(False),
    "setitem": lambda made: made.__setitem__((slice(None), 1), False),
    "a view": _of_a_view,
    "iand": lambda made: made.__iand__(torch.ones_like(made).tril()),
    "out": _by_out,
    "random": lambda made: made.bernoulli_(1.0),
}


@pytest.mark.parametrize("how", ["compile", "backend"])
@pytest.mark.parametrize("write", WRITES)
def test_a_mask_that_is_written_to_stays(write: str, how: str) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = _attention(_written(WRITES[write])), torch.randn(2, LENGTH, 8)
    eager = model(x)
    compiled = memplan.compile(model, x) if how == "compile" else torch.compile(model, backend=memplan.Backend())
    torch.testing.assert_close(compiled(x), eager, rtol=0, atol=0)
