"""Options that make no sense are refused when compiling, by errors of memplan's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import memplan
from memplan.errors import InvalidShapes, MemplanError

_VARYING = {"input": {0: Dim("batch", min=1, max=16)}}


@pytest.mark.parametrize(
    ("options", "kind", "what"),
    [
        ({"plan": 7}, MemplanError, "plan: is a int"),
        ({"time_limit": "1"}, MemplanError, "time_limit"),
        ({"solver": 5}, MemplanError, "solver"),
        ({"sanitize": torch.ones(3)}, MemplanError, "sanitize="),
        ({"in_place": "no"}, MemplanError, "in_place="),
        ({"device": "cpu:99999"}, MemplanError, "cpu:99999"),
        ({"dynamic_shapes": _VARYING, "bucketing": 5}, InvalidShapes, "bucketing: is a int"),
    ],
    ids=str,
)
def test_by_compile(options: dict[str, Any], kind: type[MemplanError], what: str) -> None:
    with pytest.raises(kind) as error:
        memplan.compile(nn.Linear(3, 3), torch.randn(2, 3), **options)
    assert what in str(error.value)


@pytest.mark.parametrize(
    "options",
    [*({"accumulate": k} for k in (float("nan"), 1.5, True, "2", None)), {"clip_grad_norm": "1"}],
    ids=str,
)
def test_by_compile_step(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 3)
    batch = torch.randn(2, 3), torch.randn(2, 3)
    with pytest.raises(MemplanError, match=next(iter(options))):
        memplan.compile_step(
            model, torch.optim.SGD(model.parameters(), lr=0.1), nn.functional.mse_loss, batch, **options
        )


@pytest.mark.parametrize(
    "options",
    [
        {"layout": "stack"},
        {"costs": "measure", "budget": 0.5},
        {"device": "cpu"},
        {"divide": 4},
        {"compress": "bits"},
        {"gradients": "owned"},
    ],
    ids=str,
)
def test_by_a_backend_when_it_is_made(options: dict[str, Any]) -> None:
    with pytest.raises(MemplanError, match=next(iter(options))):
        memplan.Backend(**options)
