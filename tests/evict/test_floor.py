"""The smallest budget against hand-written activation checkpoints, on models of six blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)
from torch.utils.checkpoint import checkpoint

import memplan
from benchmarks import zoo
from memplan.core.plan import Plan

_WIDTH, _LAYERS, _VOCAB, _BATCH, _LENGTH = 32, 6, 64, 4, 64


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.queries, self.projection = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.mlp = nn.Sequential(nn.Linear(_WIDTH, 4 * _WIDTH), nn.GELU(), nn.Linear(4 * _WIDTH, _WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        parts = self.queries(self.first(hidden)).unflatten(-1, (3, 2, -1)).unbind(-3)
        attended = F.scaled_dot_product_attention(*(part.transpose(-3, -2) for part in parts))
        hidden = hidden + self.projection(attended.transpose(-3, -2).flatten(-2))
        mixed: Tensor = hidden + self.mlp(self.second(hidden))
        return mixed


class _Traversals(nn.Module):
    """Half as many blocks, which run twice, the second time on the result of the first (pytorch#193193)."""

    def __init__(self) -> None:
        super().__init__()
        self.is_checkpointed = False
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS // 2))

    def forward(self, hidden: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.is_checkpointed else block(hidden)
        return hidden

    def gradient_checkpointing_enable(self, _: dict[str, Any]) -> None:
        self.is_checkpointed = True


def _gpt2() -> zoo.Example:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=_LAYERS, n_embd=_WIDTH, n_head=2, vocab_size=_VOCAB, n_positions=_LENGTH, bos_token_id=0,
        eos_token_id=0, use_cache=False, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return zoo.NextToken(GPT2LMHeadModel(config)), (_tokens(),)


def _traversals() -> zoo.Example:
    inputs, targets = (torch.randn(_BATCH, _LENGTH, _WIDTH) for _ in range(2))
    return zoo.Regression(_Traversals()), (inputs, targets)


def _tokens() -> Tensor:
    return torch.randint(_VOCAB, (_BATCH, _LENGTH))


def _beyond_gradients(plan: Plan) -> int:
    """The bytes of the arena less those of the parameters' gradients in it."""
    storages = [plan.graph.storages[s] for s in {plan.graph.values[v].storage for v in plan.graph.gradients}]
    return plan.arena_size - sum(-(-one.nbytes // 64) * 64 for one in storages if one.planned)


@pytest.mark.slow
@pytest.mark.parametrize("make", [_gpt2, _traversals])
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_the_smallest_budget_is_below_what_one_checkpoint_per_block_needs(make: Callable[[], zoo.Example]) -> None:
    torch.manual_seed(0)
    model, inputs = make()
    model(*inputs).backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    compiled = memplan.compile(model, inputs, gradients="arena", policy="recompute", budget="min")
    compiled(*inputs).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected)

    blocks: Any = model.model
    blocks.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = memplan.plan(model, inputs, gradients="arena")
    assert checkpointed.eviction is not None
    assert _beyond_gradients(compiled.plan) <= 0.9 * _beyond_gradients(checkpointed)
