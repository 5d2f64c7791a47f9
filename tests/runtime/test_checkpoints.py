"""Activation checkpoints of the user's: followed, so that no more is kept than eager keeps, with eager's bits."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memplan
from memplan.core.evictions import RNG_STATE_BYTES, SAVE_RNG
from memplan.devices.measure import peak_bytes
from memplan.errors import BudgetInfeasible, UnsupportedGraph
from memplan.evict.costs import DEVICES
from memplan.evict.measure import measure
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.checkpoint import checkpoint as checkpoint_policy
from memplan.evict.workload import Events, Workload
from memplan.planning.fit import make_workload
from memplan.schedule import order
from memplan.trace import capture_call, plan, trace
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
    "alpha_dropout": lambda h: nn.functional.alpha_dropout(h, 0.3, training=True),
    "randn_like": lambda h: h * torch.randn_like(h),
    "rand": lambda h: h + torch.rand(h.shape),
    "bernoulli": lambda h: h * torch.bernoulli(torch.sigmoid(h)),
    "exponential_": lambda h: h * torch.empty_like(h).exponential_(),
    "rrelu": lambda h: nn.functional.rrelu(h, training=True),
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

    def __init__(self, call: Callable[..., Any] = _CHECKPOINTED, dropout: float = 0.0, draws: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_block(dropout) for _ in range(_BLOCKS))
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


def _step(model: nn.Module) -> list[torch.Tensor]:
    torch.manual_seed(2)
    model.zero_grad()
    x = _x().requires_grad_()
    out = model(x)
    out.mean().backward()
    grads = [p.grad.clone() for p in (*model.parameters(), x) if p.grad is not None]
    return [out.detach(), *grads, torch.get_rng_state()]


def _traversed(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """One checkpoint in another."""
    result: torch.Tensor = _CHECKPOINTED(lambda y: _CHECKPOINTED(block, torch.sin(y)), x)
    return result


@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
@pytest.mark.parametrize(
    "call",
    [
        _CHECKPOINTED,
        partial(checkpoint, use_reentrant=True),
        partial(_CHECKPOINTED, context_fn=_products_saved),
        slow(_traversed),
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


def _saves(found: memplan.Plan) -> int:
    return sum(op.target == SAVE_RNG for op in found.graph.ops)


@pytest.mark.parametrize("draws", [d if d in ("randn_like", "attention") else slow(d) for d in _RANDOM])
def test_random_numbers_are_drawn_again_with_eagers_bits(draws: str, tmp_path: Any) -> None:
    model = Net(draws=draws)
    compiled = memplan.compile(model, _x().requires_grad_())
    for _ in range(2):
        assert all(map(torch.equal, _step(compiled), _step(model)))
    assert _saves(compiled.plan) >= _BLOCKS
    compiled.plan.save(tmp_path / "plan.json")
    again = memplan.compile(model, _x().requires_grad_(), plan=memplan.load(tmp_path / "plan.json"))
    assert all(map(torch.equal, _step(again), _step(model)))


@pytest.mark.slow
@pytest.mark.parametrize(("draws", "sanitize"), [("dropout", "redzone"), slow("randn_like", "poison")])
def test_random_numbers_under_budgets_from_all_to_the_least(draws: str, sanitize: Any) -> None:
    model, cheap = Net(_PLAIN, draws=draws), replace(DEVICES["cpu"], draw=0.0)  # numbers that are drawn again
    expected, saves = _step(model), 0
    for budget in ("min", 0.05, 0.5, 0.8, 1.0):
        try:
            compiled = memplan.compile(
                model, _x().requires_grad_(), budget=budget, policy="recompute", sanitize=sanitize, costs=cheap
            )
        except BudgetInfeasible:
            assert budget in (0.05, 0.5)
            continue
        assert all(map(torch.equal, _step(compiled), expected))
        saves += _saves(compiled.plan)
    assert saves


def test_a_mask_takes_no_bytes_until_the_backward() -> None:
    wide = _ROWS * _WIDTH * 4
    without, with_masks = (plan(Net(dropout=dropout), _x()) for dropout in (0.0, 0.3))
    assert _saves(with_masks) == _BLOCKS
    assert with_masks.max_live <= without.max_live + _BLOCKS * RNG_STATE_BYTES + 3 * wide


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_no_more_is_live_than_eager_allocates(dropout: float) -> None:
    model = Net(dropout=dropout)
    _step(model)
    model.zero_grad()  # not in what is measured, where freed gradients would be taken off
    (eager,) = peak_bytes([lambda: model(_x()).mean().backward()], torch.device("cpu"))
    assert plan(model, _x()).max_live <= eager


def test_a_region_runs_again_once_and_what_a_layer_outside_saves_is_kept() -> None:
    found = plan(Net(), _x())
    again = [op.name for op in found.graph.ops if "@" in op.name]
    assert len(again) == len(set(again))
    targets = [op.target for op in found.graph.ops if "@" in op.name]
    assert targets.count("aten.gelu.default") == _BLOCKS
    assert targets.count("aten.addmm.default") == _BLOCKS  # the first of each block, whose result the backward reads
    assert "aten.tanh.default" not in targets


def test_what_regions_compute_alike_runs_again_in_each() -> None:
    """A small result that two regions compute alike is not shared: it would make one run again for the other."""

    class Conditioned(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            condition = self.head(x[:4])  # as the embedding of a time step, small
            for block in self.blocks:
                h = self.call(lambda h, c, b=block: b(h + nn.functional.silu(c).sum()), x, condition)
                x = x + torch.tanh(h)
            return x.square()

    ops = plan(Conditioned(), _x()).graph.ops
    again = [(op.checkpoint, op.target) for op in ops if "@" in op.name]
    assert [target for _, target in again].count("aten.silu.default") == _BLOCKS
    regions = [region for region, _ in again]
    assert [r for i, r in enumerate(regions) if r != (regions[i - 1] if i else 0)] == sorted(set(regions), reverse=True)


def test_blocks_that_share_their_parameters_and_are_traversed_twice() -> None:
    class Twice(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    model = Twice()
    compiled = memplan.compile(model, _x().requires_grad_())
    assert all(map(torch.equal, _step(compiled), _step(model)))
    assert compiled.plan.max_live < 0.6 * plan(Twice(_PLAIN), _x().requires_grad_()).max_live


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_transformers_gradient_checkpointing(dropout: float) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, num_hidden_layers=4, vocab_size=50, use_cache=False, attention_dropout=dropout)
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).train()
    _follows_transformers(model, 0.7)


@pytest.mark.slow
def test_transformers_gradient_checkpointing_with_dropout() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    dropout = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.1)
    config = GPT2Config(n_embd=32, n_layer=4, n_head=2, n_positions=64, vocab_size=50, use_cache=False, **dropout)
    _follows_transformers(GPT2LMHeadModel(config).train(), 0.7)


def _follows_transformers(model: Any, share: float) -> None:
    """Compile a language model with its checkpoints enabled: less memory, and eager's bits and generator."""
    ids = {"input_ids": torch.randint(50, (4, 64)), "labels": torch.randint(50, (4, 64))}
    plain = plan(model, (), ids)
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    compiled = memplan.compile(model, (), ids)
    assert compiled.plan.max_live < share * plain.max_live
    found = []
    for step in (model, compiled):
        torch.manual_seed(1)
        model.zero_grad()
        step(**ids).loss.backward()
        found.append([*(p.grad.clone() for p in model.parameters()), torch.get_rng_state()])
    assert all(map(torch.equal, *found))


def test_evaluation_has_nothing_to_follow() -> None:
    found = plan(Net().eval(), _x(), train=False)
    assert found.eviction is None
    assert found.max_live == plan(Net(_PLAIN).eval(), _x(), train=False).max_live


def test_a_plan_with_checkpoints_is_saved_and_loaded(tmp_path: Any) -> None:
    found = plan(Net(), _x())
    found.save(tmp_path / "plan.json")
    assert memplan.load(tmp_path / "plan.json") == found


@pytest.mark.parametrize("limit", ["arena_budget", "budget"])
def test_a_budget_goes_below_what_the_checkpoints_need(limit: Any) -> None:
    model = Net()
    followed = memplan.compile(model, _x().requires_grad_()).plan
    asked: dict[str, Any] = {limit: "min"}
    compiled = memplan.compile(model, _x().requires_grad_(), policy="recompute", **asked)
    sizes = [p.total if limit == "budget" else p.arena_size for p in (compiled.plan, followed)]
    assert sizes[0] <= sizes[1]
    assert all(map(torch.equal, _step(compiled), _step(model)))


def test_where_checkpoints_are_not_followed_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "memplan"):
        assert memplan.plan(Net(), _x(), device=("cpu:0", "cpu:1"))
    assert re.search("activation checkpoints .*are not followed", caplog.text)


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
def test_with_dynamic_shapes_no_more_is_kept(dropout: float, tmp_path: Path) -> None:
    shapes = {"x": {0: torch.export.Dim("rows", min=2, max=256)}}
    model = Net(dropout=dropout)
    compiled = memplan.compile(model, _x().requires_grad_(), dynamic_shapes=shapes)
    assert all(map(torch.equal, _step(compiled), _step(model)))
    for rows in (8, 96, 200):
        x = torch.randn(rows, _WIDTH)
        results = []
        for one in (model, compiled):
            one.zero_grad()
            torch.manual_seed(0)
            one(x).mean().backward()
            results.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        assert all(map(torch.equal, *results))
    plain = memplan.plan(Net(_PLAIN, dropout), _x(), dynamic_shapes=shapes)
    kept = (0.8 if dropout else 0.6) * plain.arena_size({"rows": _ROWS})  # masks are kept
    assert compiled.symbolic is not None
    assert compiled.symbolic.arena_size({"rows": _ROWS}) < kept
    compiled.symbolic.save(tmp_path / "symbolic.json")
    assert memplan.load_symbolic(tmp_path / "symbolic.json") == compiled.symbolic


@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
def test_where_the_step_runs_on_another_device_no_more_is_kept(dropout: float) -> None:
    model = Net(dropout=dropout)
    compiled = memplan.compile(model, _x().requires_grad_(), device="cpu")
    assert all(map(torch.equal, _step(compiled), _step(model)))
    without = memplan.compile(Net(_PLAIN, dropout), _x().requires_grad_(), device="cpu")
    assert compiled.plan.max_live < 0.8 * without.plan.max_live


@pytest.mark.parametrize(
    "options",
    [
        {"gradients": "arena"},
        slow({"gradients": "outside"}),
        {"sanitize": "poison"},
        {"divide": 4},
        {"compress": "bits"},
        slow({"schedule": "traced", "in_place": False}),
    ],
    ids=str,
)
def test_other_options_beside_checkpoints(options: dict[str, Any]) -> None:
    model = Net(dropout=0.3)
    compiled = memplan.compile(model, _x().requires_grad_(), **options)
    assert all(map(torch.equal, _step(compiled), _step(model)))
    assert compiled.plan.eviction is not None


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
def test_a_hint_needs_no_more_bytes_and_no_more_time(dropout: float) -> None:
    model = Net(dropout=dropout)
    followed, hinted = (memplan.plan(model, _x().requires_grad_(), checkpoint=how) for how in ("follow", "plan"))
    assert followed.eviction is not None
    assert hinted.eviction is not None
    assert followed.eviction.policy == "checkpoint"
    assert hinted.arena_size <= followed.arena_size
    assert hinted.total <= followed.total
    assert hinted.eviction.seconds <= followed.eviction.seconds
    for policy in ("auto", "recompute"):
        compiled = memplan.compile(model, _x().requires_grad_(), checkpoint="plan", policy=policy)
        assert all(map(torch.equal, _step(compiled), _step(model)))
    with pytest.raises(memplan.MemplanError, match="checkpoint='ignore'"):
        memplan.plan(model, _x(), checkpoint="ignore")  # type: ignore[call-overload]


def test_a_hint_that_no_policy_keeps_is_followed() -> None:
    def gives_up(workload: Workload) -> Events:
        raise BudgetInfeasible("no", op="", smallest=0)

    found = memplan.plan(Net(), _x(), checkpoint="plan", policy=gives_up)
    assert found.eviction is not None
    assert found.eviction.policy == "checkpoint"
    assert found.arena_size == memplan.plan(Net(), _x()).arena_size


def test_a_budget_that_the_checkpoints_keep_is_kept_in_no_more_time() -> None:
    graph = trace(Net(), (_x(),)).graph
    plain = make_workload(graph, order(graph).order, DEVICES["cpu"], 64)
    events = checkpoint_policy(plain)
    followed = measure(plain, events)
    for policy in (auto, recompute):
        found = measure(plain, policy(plain.within(followed.peak), work=1000))
        assert found.peak <= followed.peak
        assert found.seconds <= followed.seconds


def test_gradients_that_eager_lacks_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net(partial(checkpoint, use_reentrant=True))
    with caplog.at_level("WARNING", "memplan"):
        memplan.plan(model, _x().requires_grad_())
        assert not caplog.messages
        compiled = memplan.compile(
            model, _x(), on_mismatch="replan"
        )  # the input of the first block requires no gradient
        compiled(torch.randn(2 * _ROWS, _WIDTH))
        assert len(caplog.messages) == 1
        torch.compile(model, backend=memplan.Backend())(_x())
        assert len(caplog.messages) == 2
    assert caplog.text.count("no input of this checkpoint requires a gradient") == 2
    assert "test_checkpoints.py:" in caplog.text


def test_batch_norm_in_a_region_is_said_and_updates_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Net()
    for block in model.blocks:
        cast(nn.Sequential, block)[1] = nn.BatchNorm1d(4 * _WIDTH)
    with caplog.at_level("WARNING", "memplan"):
        compiled = memplan.compile(model, _x().requires_grad_())
    said = [message for message in caplog.messages if "updates its running statistics twice" in message]
    assert len(said) == _BLOCKS
    assert "blocks.0.1" in caplog.text
    _step(compiled)
    assert [b.item() for name, b in model.named_buffers() if name.endswith("tracked")] == [1] * _BLOCKS
    decomposed = capture_call(model, _x().requires_grad_(), kernels="inductor").captured
    assert [w for w in decomposed.warnings if "twice in each step" in w] == [one.split(": ", 1)[1] for one in said]
    caplog.clear()
    with caplog.at_level("WARNING", "memplan"):
        memplan.plan(model.eval(), _x().requires_grad_(), train=True)
    assert not caplog.messages


class _Counts(nn.Module):
    """Multiplies by a buffer that it has raised, inside of a checkpoint."""

    raised: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.register_buffer("raised", torch.zeros(_WIDTH))

    def _multiplied(self, x: torch.Tensor) -> torch.Tensor:
        self.raised += 1
        found: torch.Tensor = self.layer(x).sin() * self.raised
        return found

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self._multiplied, x, use_reentrant=False)
        return found


def test_a_buffer_that_is_changed_in_a_region_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = _Counts(), _x().requires_grad_()
    with caplog.at_level("WARNING", "memplan"):
        compiled = memplan.compile(model, x)
    (said,) = caplog.messages
    assert "changed in place inside of a checkpoint. Eager changes it twice" in said
    assert "test_checkpoints.py:" in said
    compiled(x).sum().backward()
    assert torch.equal(model.raised, torch.ones(_WIDTH))


def test_a_whole_step_and_a_graph_of_torch_compile() -> None:
    model, eager = Net(dropout=0.3), Net(dropout=0.3)
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
    assert _saves(step.plan) == _BLOCKS
    backend = memplan.Backend()
    torch._dynamo.reset()  # otherwise it takes dropout's rate, which differs between tests, for a number that varies
    assert all(map(torch.equal, _step(cast(nn.Module, torch.compile(model, backend=backend))), _step(model)))
    assert _saves(backend.graphs[0].plans[0]) == _BLOCKS


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


@pytest.mark.parametrize("dropout", [slow(0.0), 0.3])
def test_a_checkpoint_within_another_keeps_no_more_than_eager_keeps(dropout: float) -> None:
    model = Nested(dropout)
    compiled = memplan.compile(model, _x().requires_grad_())
    for _ in range(2):
        assert all(map(torch.equal, _step(compiled), _step(model)))
    products = [op.name for op in compiled.plan.graph.ops if op.name.startswith("addmm@") and "_" not in op.name]
    assert len(products) == 2, "the first product runs again with its stage, and with its block"

    def measured(call: nn.Module) -> int:
        def run() -> None:
            _step(call)

        return peak_bytes([run], torch.device("cpu"))[0]

    peaks = [measured(call) for call in (model, cast(nn.Module, compiled))]
    state = 5056 + 1024  # of the generator, which eager's checkpoints hold as long as they like, and what holds it
    assert peaks[1] + compiled.plan.arena_size <= peaks[0] + state
    flat = memplan.plan(Nested(dropout, _PLAIN), _x().requires_grad_())
    assert compiled.plan.max_live < 0.8 * flat.max_live


class Settles(nn.Module):
    """Inside of a checkpoint, its first call sets an attribute to a value that all later calls find."""

    def __init__(self, *, begins_otherwise: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(_WIDTH, _WIDTH)
        self.window, self.begins_otherwise = 100, begins_otherwise

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _CHECKPOINTED(self._region, x)
        return result.square()

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        if self.begins_otherwise and self.window == 100:
            x = torch.cos(x)
        self.window = min(self.window, x.shape[0])
        return torch.tanh(self.layer(x)) / self.window


def test_an_attribute_that_settles_inside_of_a_checkpoint_is_set_as_eager_sets_it() -> None:
    model, reference = Settles(), Settles()
    compiled = memplan.compile(model, _x().requires_grad_(), fullgraph=True)
    assert model.window == _ROWS
    assert all(map(torch.equal, _step(compiled), _step(reference)))
    assert any(op.checkpoint for op in compiled.plan.graph.ops)
    memplan.plan(model, _x().requires_grad_())  # it has settled


def test_a_region_that_computes_something_else_in_its_first_call_is_refused() -> None:
    model = Settles(begins_otherwise=True)
    with pytest.raises(UnsupportedGraph, match="different in its first call"):
        memplan.plan(model, _x().requires_grad_())
    assert model.window == 100


class Counts(Settles):
    """Counts the calls of its region, which eager runs twice in each step."""

    calls = 0

    def _region(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.layer(x))


def test_a_region_that_counts_its_calls_is_left_to_python() -> None:
    with pytest.raises(UnsupportedGraph, match="Python state"):
        memplan.plan(Counts(), _x().requires_grad_())
    model, reference = Counts(), Counts()
    compiled = memplan.compile(model, _x().requires_grad_())
    before = model.calls
    assert all(map(torch.equal, _step(compiled), _step(reference)))
    assert model.calls - before == reference.calls == 2


class LeavesWithin(nn.Module):
    """Has a tensor that forward makes require a gradient, as T5 of transformers does in its checkpoints."""

    def __init__(self, *, returned: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.returned = nn.Linear(_WIDTH, _WIDTH), returned

    def forward(self, x: torch.Tensor) -> Any:
        result, bias = _CHECKPOINTED(self._region, x)
        result = _CHECKPOINTED(lambda y: torch.sin(y) + bias, result)
        return (result, bias) if self.returned else result

    def _region(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        bias = torch.zeros(1, _WIDTH)
        bias.requires_grad = True
        return torch.tanh(self.layer(x) + bias), 2 * bias


def test_an_intermediate_that_is_set_to_require_a_gradient_is_traced() -> None:
    model = LeavesWithin()
    compiled = memplan.compile(model, _x().requires_grad_(), fullgraph=True)
    for _ in range(2):
        assert all(map(torch.equal, _step(compiled), _step(model)))
    assert any(op.checkpoint for op in compiled.plan.graph.ops)
    step = memplan.compile_step(
        model, torch.optim.SGD(model.parameters(), lr=0.1), lambda out: out.sum(), (_x(),), fullgraph=True
    )
    reference = LeavesWithin()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    step(_x())
    reference(_x()).sum().backward()
    optimizer.step()
    assert all(map(torch.equal, model.parameters(), reference.parameters()))


def test_an_intermediate_that_is_returned_requires_a_gradient_as_in_eager() -> None:
    model = LeavesWithin(returned=True)
    compiled = memplan.compile(model, _x())
    assert [t.requires_grad for t in compiled(_x())] == [t.requires_grad for t in model(_x())] == [True, True]
