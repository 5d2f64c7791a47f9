"""Activation checkpoints of the user's: followed, so that no more is kept than eager keeps, with eager's bits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memplan
from memplan.errors import UnsupportedGraph
from memplan.trace import plan

_WIDTH, _ROWS, _BLOCKS = 32, 64, 6


def _block(dropout: float) -> nn.Sequential:
    layers = [nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * _WIDTH, _WIDTH)]
    return nn.Sequential(*layers)


def _products_saved() -> Any:
    """A selective policy: products are kept, everything else is computed again."""
    return create_selective_checkpoint_contexts(  # type: ignore[no-untyped-call]
        lambda _, op, *args, **kwargs: (
            CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE
        )
    )


_PLAIN: Callable[..., Any] = lambda block, x: block(x)  # noqa: E731
_CHECKPOINTED = partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Residual blocks, each called through `call`, and layers outside of them that save what they read."""

    def __init__(self, call: Callable[..., Any] = _CHECKPOINTED, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(_BLOCKS))
        self.head = nn.Linear(_WIDTH, _WIDTH)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(self.call(block, x))
        result: torch.Tensor = self.head(x).square()
        return result


def _x() -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(1))


def _step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    x = _x().requires_grad_()
    out = model(x)
    out.mean().backward()
    return [out.detach(), *(p.grad.clone() for p in (*model.parameters(), x) if p.grad is not None)]


def _traversed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One checkpoint in another."""
    result: torch.Tensor = _CHECKPOINTED(lambda y: _CHECKPOINTED(block, torch.sin(y)), x)
    return result


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize(
    "call",
    [
        _CHECKPOINTED,
        partial(checkpoint, use_reentrant=True),
        partial(_CHECKPOINTED, context_fn=_products_saved),
        _traversed,
    ],
    ids=["region", "reentrant", "selective", "nested"],
)
def test_followed_with_eagers_bits_and_less_memory(call: Callable[..., Any], dropout: float) -> None:
    model = Net(call, dropout)
    compiled = memplan.compile(model, _x().requires_grad_())
    for _ in range(2):
        assert all(map(torch.equal, _step(compiled), _step(model)))
    assert compiled.plan.eviction is not None
    without = plan(Net(_PLAIN, dropout), _x().requires_grad_())
    assert compiled.plan.max_live < (0.9 if "context_fn" in getattr(call, "keywords", {}) else 0.6) * without.max_live


def test_a_region_runs_again_once_and_what_a_layer_outside_saves_is_kept() -> None:
    found = plan(Net(), _x())
    again = [op.name for op in found.graph.ops if "@" in op.name]
    assert len(again) == len(set(again))
    targets = [op.target for op in found.graph.ops if "@" in op.name]
    assert targets.count("aten.gelu.default") == _BLOCKS
    assert targets.count("aten.addmm.default") == _BLOCKS  # the first of each block, whose result the backward reads
    assert "aten.tanh.default" not in targets


def test_blocks_that_share_their_parameters_and_are_traversed_twice() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    model = Twice()
    compiled = memplan.compile(model, _x().requires_grad_())
    assert all(map(torch.equal, _step(compiled), _step(model)))
    assert compiled.plan.max_live < 0.6 * plan(Twice(_PLAIN), _x().requires_grad_()).max_live


def test_transformers_gradient_checkpointing() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=50, use_cache=False)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    ids = {"input_ids": torch.randint(50, (4, 16)), "labels": torch.randint(50, (4, 16))}
    plain = plan(model, (), ids)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    compiled = memplan.compile(model, (), ids)
    assert compiled.plan.max_live < 0.7 * plain.max_live
    expected = torch.autograd.grad(model(**ids).loss, list(model.parameters()))
    compiled(**ids).loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), expected, strict=True) if p.grad is not None)


def test_evaluation_has_nothing_to_follow() -> None:
    found = plan(Net().eval(), _x(), train=False)
    assert found.eviction is None
    assert found.max_live == plan(Net(_PLAIN).eval(), _x(), train=False).max_live


def test_a_checkpoint_that_only_export_can_read_is_refused() -> None:
    class Prints(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(UnsupportedGraph, match="has activation checkpoints"):
        plan(Prints(), _x())
    plan(Prints(_PLAIN), _x())  # without checkpoints, export reads it


def test_a_plan_with_checkpoints_is_saved_and_loaded(tmp_path: Any) -> None:
    found = plan(Net(), _x())
    found.save(tmp_path / "plan.json")
    assert memplan.load(tmp_path / "plan.json") == found


def test_a_budget_goes_below_what_the_checkpoints_need() -> None:
    model = Net()
    followed = plan(model, _x())
    compiled = memplan.compile(model, _x().requires_grad_(), arena_budget="min", policy="recompute")
    assert compiled.plan.arena_size <= followed.arena_size
    assert all(map(torch.equal, _step(compiled), _step(model)))


def test_where_checkpoints_are_not_followed_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    rows = torch.export.Dim("rows", min=2, max=128)
    for options in ({"device": "cpu"}, {"dynamic_shapes": {"x": {0: rows}}}):
        caplog.clear()
        with caplog.at_level("WARNING", "memplan"):
            assert memplan.plan(Net(), _x(), **options)
        assert "activation checkpoints of the model are not followed" in caplog.text


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": "arena"},
        {"gradients": "owned"},
        {"sanitize": "poison"},
        {"divide": 4},
        {"compress": "bits"},
        {"schedule": "traced", "in_place": False},
    ],
    ids=str,
)
def test_other_options_beside_checkpoints(options: dict[str, Any]) -> None:
    model = Net(dropout=0.3)
    compiled = memplan.compile(model, _x().requires_grad_(), **options)
    assert all(map(torch.equal, _step(compiled), _step(model)))
    assert compiled.plan.eviction is not None


def test_a_whole_step_and_a_graph_of_torch_compile() -> None:
    model, eager = Net(), Net()
    ours, theirs = (torch.optim.AdamW(m.parameters(), fused=True) for m in (model, eager))
    step = memplan.compile_step(model, ours, torch.mean, (_x(),))
    for _ in range(2):
        theirs.zero_grad()
        loss = eager(_x()).mean()
        loss.backward()
        theirs.step()
        assert torch.equal(step(_x()), loss.detach())
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert step.plan.eviction is not None
    backend = memplan.Backend()
    assert all(map(torch.equal, _step(cast(nn.Module, torch.compile(model, backend=backend))), _step(model)))
    assert backend.graphs[0].plans[0].eviction is not None
