"""Activation checkpoints of the user's: followed, so that no more is kept than eager keeps, with eager's bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memplan
from memplan.core.evictions import SAVE_RNG
from memplan.errors import BudgetInfeasible
from memplan.evict.workload import Events, Workload
from memplan.trace import plan
from tests.slow import slow

_WIDTH, _ROWS, _BLOCKS = 32, 64, 4


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


_RANDOM: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda h: nn.functional.dropout(h, 0.3),
    "randn_like": lambda h: h * torch.randn_like(h),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h)),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(),
    "attention": lambda h: _attention(h.view(2, 32, 4, 32).transpose(1, 2)).transpose(1, 2).reshape(h.shape),
}


def _attention(heads: torch.Tensor) -> torch.Tensor:
    return nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2)


class Draws(nn.Module):
    """A layer without parameters that draws random numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return _RANDOM[self.name](h)


_PLAIN: Callable[..., Any] = lambda block, x: block(x)  # noqa: E731
_CHECKPOINTED = partial(checkpoint, use_reentrant=False)


class Net(nn.Module):
    """Residual blocks, each called through `call`, and layers outside of them that save what they read."""

    def __init__(
        self, call: Callable[..., Any] = _CHECKPOINTED, dropout: float = 0.0, draws: str = "", blocks: int = _BLOCKS
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(blocks))
        for block in self.blocks if draws else ():
            cast(nn.Sequential, block)[2] = Draws(draws)
        self.head = nn.Linear(_WIDTH, _WIDTH)
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + torch.tanh(self.call(block, x))
        result: torch.Tensor = self.head(x).square()
        return result


def _x() -> torch.Tensor:
    return torch.randn(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(1))


def _leaf() -> torch.Tensor:
    return _x().requires_grad_()


def _step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    x = _leaf()
    out = model(x)
    out.mean().backward()
    grads = [p.grad.clone() for p in (*model.parameters(), x) if p.grad is not None]
    return [out.detach(), *grads, torch.get_rng_state()]


def _compiled(model: nn.Module, **options: Any) -> memplan.CompiledModule:
    """The compiled model, after two steps that had eager's bits."""
    compiled = memplan.compile(model, _leaf(), **options)
    for _ in range(2):
        assert all(map(torch.equal, _step(compiled), _step(model)))
    return compiled


@pytest.mark.parametrize(
    "call",
    [
        _CHECKPOINTED,
        slow(partial(checkpoint, use_reentrant=True)),
        slow(partial(_CHECKPOINTED, context_fn=_products_saved)),
    ],
    ids=["region", "reentrant", "selective"],
)
def test_followed_with_eagers_bits_and_less_memory(call: Callable[..., Any]) -> None:
    compiled = _compiled(Net(call, 0.3))
    assert compiled.plan.eviction is not None
    without = plan(Net(_PLAIN, 0.3), _leaf())
    assert compiled.plan.max_live < (0.9 if "context_fn" in getattr(call, "keywords", {}) else 0.6) * without.max_live


def _saves(found: memplan.Plan) -> int:
    return sum(op.target == SAVE_RNG for op in found.graph.ops)


@pytest.mark.parametrize("draws", [d if d == "randn_like" else slow(d) for d in _RANDOM])
def test_random_numbers_are_drawn_again_with_eagers_bits(draws: str, tmp_path: Any) -> None:
    model = Net(draws=draws, blocks=2)
    compiled = _compiled(model)
    assert _saves(compiled.plan) >= 2
    compiled.plan.save(tmp_path / "plan.json")
    _compiled(model, plan=memplan.load(tmp_path / "plan.json"))


def test_a_region_runs_again_once_and_what_a_layer_outside_saves_is_kept() -> None:
    found = plan(Net(), _x())
    again = [op.name for op in found.graph.ops if "@" in op.name]
    assert len(again) == len(set(again))
    targets = [op.target for op in found.graph.ops if "@" in op.name]
    assert targets.count("aten.gelu.default") == _BLOCKS
    assert targets.count("aten.addmm.default") == _BLOCKS  # the first of each block, whose result the backward reads
    assert "aten.tanh.default" not in targets


def _llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=50, use_cache=False, attention_dropout=0.1)
    return LlamaForCausalLM(config).train()


@pytest.mark.slow
def test_transformers_gradient_checkpointing() -> None:
    """With its checkpoints enabled: less memory, and eager's bits and generator."""
    torch.manual_seed(0)
    model = _llama()
    ids = {"input_ids": torch.randint(50, (4, 64)), "labels": torch.randint(50, (4, 64))}
    plain = plan(model, (), ids)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    compiled = memplan.compile(model, (), ids)
    assert compiled.plan.max_live < 0.7 * plain.max_live
    found = []
    for step in (model, compiled):
        torch.manual_seed(1)
        model.zero_grad()
        step(**ids).loss.backward()
        found.append([*(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("limit", ["arena_budget", slow("budget")])
def test_a_budget_goes_below_what_the_checkpoints_need(limit: Any) -> None:
    model = Net(blocks=2)
    followed = memplan.compile(model, _leaf()).plan
    asked: dict[str, Any] = {limit: "min"}
    compiled = _compiled(model, policy="recompute", **asked)
    sizes = [p.total if limit == "budget" else p.arena_size for p in (compiled.plan, followed)]
    assert sizes[0] <= sizes[1]


def test_where_checkpoints_are_not_followed_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "memplan"):
        assert memplan.plan(Net(blocks=2), _x(), device=("cpu:0", "cpu:1"))
    assert re.search("activation checkpoints .*are not followed", caplog.text)


@pytest.mark.slow
def test_a_hint_needs_no_more_bytes_and_no_more_time() -> None:
    model = Net(dropout=0.3)
    followed, hinted = (memplan.plan(model, _leaf(), checkpoint=how) for how in ("follow", "plan"))
    assert followed.eviction is not None
    assert hinted.eviction is not None
    assert followed.eviction.policy == "checkpoint"
    assert hinted.arena_size <= followed.arena_size
    assert hinted.total <= followed.total
    assert hinted.eviction.seconds <= followed.eviction.seconds
    for policy in ("auto", "recompute"):
        _compiled(model, checkpoint="plan", policy=policy)
    with pytest.raises(memplan.MemplanError, match="checkpoint='ignore'"):
        memplan.plan(model, _x(), checkpoint="ignore")  # type: ignore[call-overload]


def test_a_hint_that_no_policy_keeps_is_followed() -> None:
    def gives_up(workload: Workload) -> Events:
        raise BudgetInfeasible("no", op="", smallest=0)

    found = memplan.plan(Net(blocks=2), _x(), checkpoint="plan", policy=gives_up)
    assert found.eviction is not None
    assert found.eviction.policy == "checkpoint"
    assert found.arena_size == memplan.plan(Net(blocks=2), _x()).arena_size


def test_batch_norm_in_a_region_is_said_and_updates_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(blocks=1)
    cast(nn.Sequential, model.blocks[0])[1] = nn.BatchNorm1d(4 * _WIDTH)
    with caplog.at_level("WARNING", "memplan"):
        compiled = memplan.compile(model, _leaf())
    said = [message for message in caplog.messages if "changes it twice in each step" in message]
    assert len(said) == 1
    assert "blocks.0.1" in caplog.text
    _step(compiled)
    assert [b.item() for name, b in model.named_buffers() if name.endswith("tracked")] == [1]
    caplog.clear()
    with caplog.at_level("WARNING", "memplan"):
        memplan.plan(model.eval(), _leaf(), train=True)
    assert not caplog.messages


def test_a_whole_step_and_a_graph_of_torch_compile() -> None:
    model, eager = Net(dropout=0.3, blocks=1), Net(dropout=0.3, blocks=1)
    ours, theirs = (torch.optim.AdamW(m.parameters(), fused=True) for m in (model, eager))
    step = memplan.compile_step(model, ours, torch.mean, (_x(),))
    for seed in range(2):
        torch.manual_seed(seed)
        theirs.zero_grad()
        loss = eager(_x()).mean()
        loss.backward()
        theirs.step()
        state = torch.get_rng_state()
        torch.manual_seed(seed)
        assert torch.equal(step(_x()), loss.detach())
        assert torch.equal(torch.get_rng_state(), state)
    assert all(map(torch.equal, model.parameters(), eager.parameters()))
    assert _saves(step.plan) == 1
    backend = memplan.Backend()
    torch._dynamo.reset()  # otherwise it takes dropout's rate, which differs between tests, for a number that varies
    assert all(map(torch.equal, _step(cast(nn.Module, torch.compile(model, backend=backend))), _step(model)))
    assert _saves(backend.graphs[0].plans[0]) == 1


class Nested(nn.Module):
    """Stages of blocks, each stage in a checkpoint and each of its blocks in one of its own."""

    def __init__(self, dropout: float, call: Callable[..., Any] = _CHECKPOINTED) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(_BLOCKS))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first in range(0, _BLOCKS, 2):
            x = torch.sin(_CHECKPOINTED(self._stage, x, first))
        return x

    def _stage(self, x: torch.Tensor, first: int) -> torch.Tensor:
        for index in range(first, first + 2):
            x = torch.sin(self.call(self.blocks[index], x))
        return x


class LeavesWithin(nn.Module):
    """Has a tensor that forward makes require a gradient, as T5 of transformers does in its checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        result, bias = _CHECKPOINTED(self._region, x)
        return _CHECKPOINTED(lambda y: torch.sin(y) + bias, result)

    def _region(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = torch.zeros(1, _WIDTH)
        bias.requires_grad = True
        return torch.tanh(self.layer(x) + bias), 2 * bias


def test_an_intermediate_that_is_set_to_require_a_gradient_is_traced() -> None:
    compiled = _compiled(LeavesWithin(), fullgraph=True)
    assert any(op.checkpoint for op in compiled.plan.graph.ops)
