"""The largest batch that fits, found without memory of its size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import memplan
from memplan.core.units import parse_size
from memplan.errors import BudgetInfeasible, InvalidModel, InvalidSize
from tests.models import Made


def _layers() -> Made:
    """Two layers with something to save, and a loss."""
    layers = (nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(2))
    return Made(lambda m, x: F.mse_loss(m.layers(x), x), layers=nn.Sequential(*layers))


def make(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
    return _layers(), (torch.randn(batch, 64),)


def test_P7_the_largest_batch_that_fits() -> None:  # noqa: N802
    found = memplan.max_batch(make, arena_budget="1MiB", policy=None)
    fits, fails = (memplan.plan(*make(batch)).arena_size for batch in (found, found + 1))
    assert fits <= 1 << 20 < fails


def test_P7_evictions_make_it_larger() -> None:  # noqa: N802
    plain, planned = (
        memplan.max_batch(make, arena_budget="1MiB", policy=policy, costs="a100") for policy in (None, "recompute")
    )
    assert planned > plain
    assert memplan.plan(*make(planned), arena_budget="1MiB", policy="recompute", costs="a100").arena_size <= 1 << 20


def test_P7_gradients_in_the_arena_leave_room_for_more() -> None:  # noqa: N802
    limit = "384KiB"
    bounds: dict[str, Any] = {"policy": None}
    safe = memplan.max_batch(make, limit, gradients="outside", **bounds)
    found = memplan.max_batch(make, limit, gradients="arena", **bounds)
    fits, fails = (memplan.plan(*make(batch), gradients="arena").total for batch in (found, found + 1))
    assert fits <= parse_size(limit) < fails
    assert found > safe
    assert memplan.max_batch(make, limit, gradients="arena", policy="recompute", costs="a100") >= found
    with pytest.raises(memplan.MemplanError, match="stolen"):
        memplan.max_batch(make, limit, gradients="stolen")  # type: ignore[arg-type]


def test_nothing_of_the_models_size_is_allocated() -> None:
    def huge(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        model, _ = make(1)
        return model, (torch.randn(batch << 30, 64),)  # 256 GiB a sample

    with pytest.raises(BudgetInfeasible):
        memplan.max_batch(huge, "1GiB", policy=None)


def test_a_factory_that_looks_at_numbers_is_told_so() -> None:
    def looking(batch: int) -> tuple[nn.Module, tuple[Any, ...]]:
        x = torch.randn(batch, 64)
        return _layers(), (x if x.sum().item() > 0 else -x,)

    with pytest.raises(InvalidModel, match="fake tensors"):
        memplan.max_batch(looking, "1MiB")


def test_a_factory_that_ignores_its_batch_is_said_so() -> None:
    with pytest.raises(InvalidModel, match=r"make\(1\) and make\(1048576\) need the same memory") as caught:
        memplan.max_batch(lambda _: make(4), "1GiB", policy=None)
    assert caught.value.where == "max_batch"
    assert memplan.max_batch(lambda _: make(4), "1GiB", policy=None, lowest=7, highest=7) == 7
    assert memplan.max_batch(make, "1GiB", policy=None, highest=3) == 3


def test_a_budget_is_the_total_and_both_budgets_hold() -> None:
    found = memplan.max_batch(make, "512KiB", policy="recompute", costs="a100")
    assert memplan.plan(*make(found), budget="512KiB", policy="recompute", costs="a100").total <= 512 << 10
    with pytest.raises(BudgetInfeasible):
        memplan.plan(*make(found + 1), budget="512KiB", policy="recompute", costs="a100")
    reserved = memplan.max_batch(make, "512KiB", reserve="64KiB", policy=None)
    assert reserved < memplan.max_batch(make, "512KiB", policy=None)
    both = memplan.max_batch(make, "768KiB", arena_budget="64KiB", policy=None, gradients="outside")
    assert memplan.plan(*make(both), gradients="outside").arena_size <= 64 << 10
    with pytest.raises(InvalidSize, match="give a budget"):
        memplan.max_batch(make)
