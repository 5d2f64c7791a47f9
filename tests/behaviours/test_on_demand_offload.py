"""Capuchin: passive mode (row P3)."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.errors import InputMismatch, MemplanError, StaleActivationsError
from memplan.runtime.api.on_demand_offload import OnDemandOffload
from tests.models import Layers, Made
from tests.runtime.budgets import FAST_LINK, QUICK
from tests.steps import Outcome, outcome_after, outcome_of

_ALL = 1 << 60
CPU = torch.device("cpu")


def _net() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Layers(dropout=0.2), torch.randn(64, 16)


def _free_peak(model: nn.Module, args: tuple[Any, ...]) -> int:
    passive = OnDemandOffload(_ALL, CPU)
    outcome_of(model, lambda *a: passive.run(model, *a), *args, seed=0)
    return passive.peak


# -- calls that no plan is for ---------------------------------------------------------------------------


def test_P3_another_shape_runs_within_the_budget(caplog: pytest.LogCaptureFixture) -> None:  # noqa: N802
    model, x = _net()
    more = torch.randn(96, 16)
    budget = int(0.6 * _free_peak(model, (more,)))
    compiled = memplan.compile(model, x, arena_budget=budget, policy=QUICK, costs=FAST_LINK, on_mismatch="passive")
    expected, plan = outcome_of(model, model, more, seed=0), compiled.plan
    with caplog.at_level(logging.WARNING, "memplan"):
        assert outcome_of(model, compiled, more, seed=0).same_as(expected)
    passive = compiled.passive
    assert passive is not None
    assert passive.budget == compiled.plan.eviction.arena_budget  # type: ignore[union-attr]
    assert 0 < passive.peak <= passive.budget
    assert passive.fetched >= passive.evicted > 0
    (record,) = [r for r in caplog.records if r.name == "memplan"]
    assert "(96, 16)" in record.getMessage()
    assert "without a plan" in record.getMessage()
    # and calls that the plan is for run by it
    compiled._calls.passive = None
    assert outcome_of(model, compiled, x, seed=0).same_as(outcome_of(model, memplan.compile(model, x), x, seed=0))
    assert compiled.passive is None
    assert compiled.plan is plan


def test_P3_without_a_budget_it_is_plain_eager(caplog: pytest.LogCaptureFixture) -> None:  # noqa: N802
    model, x = _net()
    compiled = memplan.compile(model, x, on_mismatch="passive")
    with caplog.at_level(logging.WARNING, "memplan"):
        assert outcome_of(model, compiled, x[:5], seed=0).same_as(outcome_of(model, model, x[:5], seed=0))
    assert compiled.passive is None
    assert any("eagerly, without a plan" in r.getMessage() for r in caplog.records)


def test_P3_a_mode_whose_program_is_over_the_budget_runs_too() -> None:  # noqa: N802
    def uneven(m: Any, x: torch.Tensor) -> Any:
        """In eval mode it needs much more at once."""
        y = m.linear(x).tanh().tanh().tanh()
        return y.square().sum() if m.training else y.repeat(64, 1).exp().sum()

    model, x = Made(uneven, linear=nn.Linear(16, 16)), torch.randn(64, 16)
    for how in ("error", "passive"):
        compiled = memplan.compile(model, x, arena_budget=0.9, policy=QUICK, costs=FAST_LINK, on_mismatch=how)
        model.eval()
        if how == "error":
            with pytest.raises(MemplanError, match="budget"):
                compiled(x)
        else:
            assert torch.equal(compiled(x), model(x))
            assert compiled.passive is not None
        model.train()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_P3_whole_steps(accumulate: int) -> None:  # noqa: N802
    """Steps by plan and passive ones by turns: the same parameters as eager's."""
    model, x = _net()
    model.dropout = nn.Identity()
    free = copy.deepcopy(model)
    one, two = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, free))
    options: dict[str, Any] = {"arena_budget": 0.7, "policy": QUICK, "costs": FAST_LINK, "on_mismatch": "passive"}
    options |= {"accumulate": accumulate, "clip_grad_norm": 0.5}
    step = memplan.compile_step(model, one, lambda loss: loss, x, **options)
    marker = torch.ones(16)
    model.layers[0].bias.grad = marker  # type: ignore[index,union-attr]
    for k, rows in enumerate((64, 96, 80, 64, 64, 96, 64, 64)):
        batch = torch.randn(rows, 16)
        loss = free(batch)
        (loss / accumulate).backward()
        if (k + 1) % accumulate == 0:
            torch.nn.utils.clip_grad_norm_(free.parameters(), 0.5)
            two.step()
            two.zero_grad()
        torch.testing.assert_close(step(batch), loss.detach())
        assert step.pending == (k + 1) % accumulate
        for p, q in zip(model.parameters(), free.parameters(), strict=True):
            torch.testing.assert_close(p, q)
    assert model.layers[0].bias.grad is marker  # type: ignore[index,union-attr]
    assert step.passive is not None
    assert step.passive.peak > 0


def test_P3_it_has_to_be_asked_for() -> None:  # noqa: N802
    model, x = _net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = memplan.compile_step(model, optimizer, lambda loss: loss, x, on_mismatch="error")
    with pytest.raises(InputMismatch):
        step(x[:3])
    with pytest.raises(MemplanError, match="on_mismatch"):
        memplan.compile_step(model, optimizer, lambda loss: loss, x, on_mismatch="ignore")  # type: ignore[arg-type]


# -- evicting on demand ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "resnet", "unet"])
@pytest.mark.parametrize("share", [0.8, 0.5])
def test_P3_numbers_are_eagers_and_bytes_within_what_ops_need(name: str, share: float) -> None:  # noqa: N802
    model, args = ZOO[name]("nano")
    state = copy.deepcopy(model.state_dict())
    expected = outcome_of(model, model, *args, seed=0)
    free = _free_peak(model, args)
    floor = OnDemandOffload(0, CPU)
    for passive in (floor, OnDemandOffload(int(share * free), CPU)):
        model.load_state_dict(state)
        assert outcome_of(model, lambda *a, p=passive: p.run(model, *a), *args, seed=0).same_as(expected)
        assert passive.evicted > 0
    assert passive.peak <= max(passive.budget, floor.peak)


def test_a_second_backward_and_one_by_parts_have_what_they_need() -> None:
    model, x = _net()
    model.eval()

    def twice(call: Any) -> Outcome:
        model.zero_grad()
        loss = call(x)
        loss.backward(retain_graph=True)
        loss.backward()
        second = torch.autograd.grad(call(x), list(model.parameters()), create_graph=True)
        sum(g.square().sum() for g in second).backward()  # type: ignore[union-attr]
        return outcome_after(model, loss)

    assert twice(lambda x: OnDemandOffload(0, CPU).run(model, x)).same_as(twice(model))


def test_what_is_saved_after_others_came_back_is_its_own() -> None:
    """New storages take addresses of evicted ones, whose bytes are back elsewhere."""

    def penalty(x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(8):
            y = y.sigmoid().tanh()
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        del y
        total = torch.zeros(())
        for _ in range(30):
            g = g.sigmoid().tanh()
            total = total + (g * g).sum()
        return total

    x = torch.randn(64, requires_grad=True)
    (expected,) = torch.autograd.grad(penalty(x), x)
    for blocks in range(2, 26):
        passive = OnDemandOffload(x.nbytes * blocks, CPU)
        assert torch.equal(torch.autograd.grad(passive.run(penalty, x), x)[0], expected)


def test_what_was_changed_in_place_is_noticed_or_was_copied_before() -> None:
    def change(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).exp()
        z = y * w
        y.add_(1)
        return z.sum() + y.sum()

    def keep(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = (x * w).exp()
        return (y * w).sum() + (y + 1).sum()

    x, w = torch.randn(64, 16), torch.ones(16, requires_grad=True)
    with pytest.raises(RuntimeError, match="inplace"):
        change(x, w).backward()  # type: ignore[no-untyped-call]
    with pytest.raises(StaleActivationsError, match="changed in place"):
        OnDemandOffload(_ALL, CPU).run(change, x, w).backward()
    (found,) = torch.autograd.grad(OnDemandOffload(0, CPU).run(change, x, w), w)
    torch.testing.assert_close(found, torch.autograd.grad(keep(x, w), w)[0])
