"""Steps that one graph cannot hold: `memplan.compile_step` runs them as several graphs and the optimizer's own step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import InputMismatch, UnsupportedGraph
from memplan.planning.planfile import check_consistency
from memplan.runtime.api.compile_step import StepThenUpdate
from tests.runtime.test_compiled_graphs import WIDTH, Checked, _batch, _made
from tests.slow import slow


def _loss(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def _adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _eager(model: nn.Module, *, accumulate: int, clip: float | None, calls: int) -> list[torch.Tensor]:
    optimizer, losses = _adam(model), []
    for call in range(calls):
        torch.manual_seed(call)
        loss: Any = _loss(model(_batch(call)))
        (loss / accumulate).backward()
        losses.append(loss.detach())
        if (call + 1) % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("name", "accumulate", "clip"),
    [
        ("label check", 2, 0.1),
        *(slow(name, 1, None) for name in ("mask cache", "assigned buffer", "nonzero", "pruning")),
    ],
)
def test_losses_and_updates_are_eagers(name: str, accumulate: int, clip: float | None) -> None:
    eager, model = _made(name), _made(name)
    expected = _eager(eager, accumulate=accumulate, clip=clip, calls=4)
    step = memplan.compile_step(
        model, _adam(model), _loss, _batch(), accumulate=accumulate, clip_grad_norm=clip, sanitize="poison"
    )
    assert isinstance(step, StepThenUpdate)
    losses = []
    for call in range(4):
        torch.manual_seed(call)
        losses.append(step(_batch(call)))
        assert step.pending == (call + 1) % accumulate
        assert all(p.grad is None for p in model.parameters())
    assert all(map(torch.equal, losses, expected))
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))
    check_consistency(step.plan)
    assert step.plan.arena_size > 0


@pytest.mark.slow
def test_another_batch_is_planned_too_and_gradients_of_others_stay() -> None:
    eager, model = _made("label check"), _made("label check")
    mine = torch.ones(())
    first = next(model.parameters())
    first.grad = torch.full_like(first, 7)
    optimizer, expected = _adam(eager), []
    step = memplan.compile_step(model, _adam(model), _loss, _batch())
    for rows in (1024, 3):
        torch.manual_seed(rows)
        optimizer.zero_grad()
        loss: Any = _loss(eager(_batch()[:rows]))
        loss.backward()
        optimizer.step()
        expected.append(loss.detach())
        torch.manual_seed(rows)
        mine = step(_batch()[:rows])
        assert torch.equal(mine, expected[-1])
        assert first.grad is not None
        assert torch.equal(first.grad, torch.full_like(first, 7))
    assert not mine.requires_grad
    assert all(map(torch.equal, model.state_dict().values(), eager.state_dict().values()))


def test_what_needs_one_graph_refuses() -> None:
    model = _made("label check")
    with pytest.raises(UnsupportedGraph, match="cannot be traced as one graph"):
        memplan.compile_step(model, _adam(model), _loss, _batch(), budget=0.9)
    with pytest.raises(UnsupportedGraph, match="needs a closure"):
        memplan.compile_step(model, torch.optim.LBFGS(model.parameters()), _loss, _batch())
    with pytest.raises(UnsupportedGraph, match=rf"returns a tensor of shape \(1024, {WIDTH}\), but a training step"):
        memplan.compile_step(model, _adam(model), lambda out: out, _batch())(_batch())
    strict = memplan.compile_step(model, _adam(model), _loss, _batch(), on_mismatch="error")
    with pytest.raises(InputMismatch, match="was made for"):
        strict(_batch()[:3])


def test_the_log_says_where_the_graph_breaks(caplog: pytest.LogCaptureFixture) -> None:
    model = Checked()
    memplan.compile_step(model, _adam(model), _loss, _batch())
    (record,) = [record for record in caplog.records if record.name == "memplan"]
    assert "Checked is planned as several graphs, and AdamW's step() runs by itself" in record.message
    assert "Data-dependent branching (test_compiled_graphs.py:" in record.message
