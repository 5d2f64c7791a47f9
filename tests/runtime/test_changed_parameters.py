"""Parameters that change after compiling: no earlier program takes the model for the one that it was made for."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from tests.models import Made
from tests.slow import slow
from tests.steps import assert_same_step


def _body() -> Made:
    """A body, which is frozen first, and a head."""
    body = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16)).requires_grad_(False)
    return Made(lambda m, x: m.head(m.body(x).tanh()), body=body, head=nn.Linear(16, 4))


def _models() -> tuple[Any, Any]:
    torch.manual_seed(0)
    one = _body()
    return one, copy.deepcopy(one)


def _x(n: int, rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 8, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize(
    "options", [{}, slow({"gradients": "outside"}), slow({"dynamic_shapes": {"x": {0: Dim("rows", min=2)}}})]
)
def test_a_body_that_is_unfrozen_and_frozen_again(options: dict[str, Any]) -> None:
    """Its programs need arenas of several sizes, so that earlier ones are made again in the model of then."""
    model, eager = _models()
    compiled = memplan.compile(model, _x(0), **options)
    for n, wants in enumerate((False, True, True, False)):
        model.body.requires_grad_(wants)
        eager.body.requires_grad_(wants)
        for rows in (6, 40 if n > 1 else 5):
            assert_same_step(model, eager, compiled, _x(n, rows))


def test_a_larger_table_is_never_run_by_programs_of_the_first() -> None:
    """The program of a table of other size lies in a larger arena, in which the first one is made again."""

    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Parameter(torch.randn(8, 6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.rows.t()).softmax(-1).exp().square()

    torch.manual_seed(0)
    model = Table()
    eager = copy.deepcopy(model)
    compiled = memplan.compile(model, torch.randn(4, 6))
    for n, count in enumerate((8, 30, 30, 8, 30, 50)):
        if len(model.rows) != count:
            rows = torch.randn(count, 6)
            for part in (model, eager):
                part.rows = nn.Parameter(rows.clone())
        x = torch.randn(4, 6)
        assert_same_step(model, eager, compiled, x)
        assert_same_step(model, eager, compiled, x + n)
