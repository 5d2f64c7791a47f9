"""torch.TensorRef: an op whose own working set exceeds the budget is divided (row T11)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn import functional as F  # noqa: N812  (torch's own convention)

import memplan
from memplan.core.division import Division
from memplan.errors import BudgetInfeasible, InvalidSize
from memplan.evict.costs import DEVICES
from memplan.evict.workload import floor
from memplan.planning.fit import make_workload
from memplan.trace import CapturedCall, capture_call
from memplan.trace.chunking.chunk import divide
from memplan.trace.passes.rewrite import copy_of
from memplan.trace.traced import TracedGraph
from tests.models import Made
from tests.runtime.budgets import QUICK
from tests.runtime.reference import Interpreted
from tests.slow import slow
from tests.steps import outcome_of

VOCABULARY, WIDTH, BATCH, TOKENS = 512, 16, 3, 20


def _ends() -> dict[str, nn.Module]:
    return {"embedding": nn.Embedding(VOCABULARY, WIDTH), "norm": nn.LayerNorm(WIDTH)}


def _causal() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The ends of a GPT-2: tied embedding and head, next tokens."""
    torch.manual_seed(0)
    model = Made(
        lambda m, tokens: F.cross_entropy(
            F.linear(m.norm(m.embedding(tokens)), m.embedding.weight)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
        ),
        **_ends(),
    )
    return model, (torch.randint(0, VOCABULARY, (BATCH, TOKENS)),)


def _masked() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The ends of a BERT: a head with a bias, masked tokens (some labels are -100)."""
    torch.manual_seed(0)
    labels = torch.randint(0, VOCABULARY, (BATCH, TOKENS))
    labels[torch.rand(BATCH, TOKENS) < 0.5] = -100
    model = Made(
        lambda m, tokens, labels: F.cross_entropy(
            m.head(F.gelu(m.norm(m.embedding(tokens)))).flatten(0, 1), labels.flatten()
        ),
        **_ends(),
        head=nn.Linear(WIDTH, VOCABULARY),
    )
    return model, (torch.randint(0, VOCABULARY, (BATCH, TOKENS)), labels)


MODELS = {"gpt2": _causal, "bert": _masked}


@cache
def _step(name: str) -> CapturedCall:
    model, args = MODELS[name]()
    return capture_call(model, args, train=True)


@cache
def _traced(name: str, division: Division | None = None) -> TracedGraph:
    return _step(name).retrace(division=division)


def _floor(traced: TracedGraph) -> int:
    order = tuple(range(len(traced.graph.ops)))
    return floor(make_workload(traced.graph, order, DEVICES["cpu"], 64))[0]


# -- the floor falls ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_T11_the_floor_falls_to_one_copy_of_the_logits(name: str) -> None:  # noqa: N802
    """Whole, the loss head needs two copies at once; divided, the matrix product that reads their gradient is left."""
    logits = BATCH * TOKENS * VOCABULARY * 4
    rows = BATCH * (TOKENS - 1) * VOCABULARY * 4 if name == "gpt2" else logits
    whole, divided = _traced(name), _traced(name, Division(blocks=10))
    assert _floor(whole) >= 2 * rows
    weight = VOCABULARY * WIDTH * 4
    assert _floor(divided) <= logits + max(weight, 3 * logits // 10) + BATCH * TOKENS * WIDTH * 4 + 2048


# -- the values are equal ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", slow("bert")])
def test_T11_runs_in_a_budget_that_was_infeasible_bit_by_bit(name: str, tmp_path: Path) -> None:  # noqa: N802
    model, args = MODELS[name]()
    budget = _floor(_traced(name)) * 3 // 4
    with pytest.raises(BudgetInfeasible, match="divide=True may need less"):
        memplan.plan(model, args, arena_budget=budget, policy=QUICK)
    compiled = memplan.compile(model, args, arena_budget=budget, divide=True, policy=QUICK, sanitize="poison")
    assert compiled.plan.arena_size <= budget
    assert compiled.plan.division is not None
    reference = outcome_of(model, memplan.compile(model, args), *args, seed=1)
    for _ in range(2):
        assert outcome_of(model, compiled, *args, seed=1).same_as(reference)
    compiled.plan.save(tmp_path / "plan.json")
    loaded = memplan.compile(model, args, plan=tmp_path / "plan.json")
    assert loaded.plan.division == compiled.plan.division
    assert outcome_of(model, loaded, *args, seed=1).same_as(reference)


@pytest.mark.parametrize("name", ["gpt2", slow("bert")])
def test_T11_a_whole_step_is_divided_too(name: str) -> None:  # noqa: N802
    budget, losses, weights = _floor(_traced(name)) * 3 // 4, [], []
    plain: dict[str, Any] = {}
    for options in (plain, {"arena_budget": budget, "divide": True, "policy": QUICK, "sanitize": "poison"}):
        model, args = MODELS[name]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        step = memplan.compile_step(model, optimizer, lambda loss: loss, args, **options)
        assert step.plan.arena_size <= budget or not options
        losses.append(torch.stack([step(*args) for _ in range(3)]))
        weights.append([p.detach().clone() for p in model.parameters()])
    assert torch.equal(*losses)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


# -- any number of blocks, any chain -----------------------------------------------------------------------------


LOSSES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], torch.dtype]] = {
    "mean": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), torch.float32),
    "sum, 0 ignored": (
        lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), ignore_index=0, reduction="sum"),
        torch.float32,
    ),
    "shifted": (lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()), torch.float32),
    "bfloat16": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()), torch.bfloat16),
    "bfloat16 in float32": (lambda y, t: F.cross_entropy(y.flatten(0, 1).float() / 0.7, t.flatten()), torch.bfloat16),
    "smoothed": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), label_smoothing=0.1), torch.float32),
    "classes cut": (lambda y, t: F.cross_entropy(y[..., :33].flatten(0, 1), t.flatten()), torch.float32),
    "weighted": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten(), weight=y.new_ones(40)), torch.float32),
    "softmax": (lambda y, t: (torch.softmax(y * 0.5, -1)[..., 0] * t).sum(), torch.float32),
    "masked": (lambda y, t: torch.softmax(y.masked_fill(y > 1, -1e4), -1).square().sum() + t.sum(), torch.float32),
    "a pair read": (
        lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + y.max(-1).values.mean(),
        torch.float32,
    ),
    "kept": (lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()) + y.square().mean(), torch.float32),
}


@cache
def _captured(name: str) -> Interpreted:
    loss, dtype = LOSSES[name]
    torch.manual_seed(0)
    return Interpreted(
        Made(lambda m, x, y: loss(m.linear(x), y), linear=nn.Linear(8, 40, dtype=dtype)), _example(0, dtype)
    )


def _example(seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3, 7, 8, generator=generator).to(dtype)
    return x, torch.randint(0, 33, (3, 7), generator=generator)


@settings(max_examples=25)
@given(name=st.sampled_from(sorted(LOSSES)), blocks=st.integers(2, 25), seed=st.integers(0, 99))
def test_T11_any_number_of_blocks_gives_the_same_bits(name: str, blocks: int, seed: int) -> None:  # noqa: N802
    one = _captured(name)
    args = _example(seed, LOSSES[name][1])
    assert _same(one.run(*args), _divided(one, Division(blocks=blocks, over=0)).run(*args))


def _divided(one: Interpreted, division: Division) -> Interpreted:
    """The same with its graph divided; at least one block was made."""
    two = object.__new__(Interpreted)
    graph = copy_of(one.captured.graph_module.graph)
    divide(graph, division)
    graph.lint()
    assert any("_rows1" in node.name for node in graph.nodes)
    two.model = one.model
    two.captured = replace(one.captured, graph_module=fx.GraphModule(one.captured.graph_module, graph))
    return two


def _flat(result: Any) -> list[Tensor]:
    outputs, gradients, _ = result
    return [one for one in (*outputs, *gradients.values()) if one is not None]


def _same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_flat(one), _flat(two), strict=True))


def _with_its_transpose(z: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(z - z.t(), t)


# Losses of a square of logits that read it also through views with other rows, or with the same.
OTHER_ROWS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "transposed": _with_its_transpose,
    "transposed, times": lambda z, t: F.cross_entropy(z * z.t().detach(), t),
    "transposed, then another sink": lambda z, t: _with_its_transpose(z, t) + (z - z.t()).softmax(-1).square().sum(),
    "another sink, then transposed": lambda z, t: z.softmax(-1).square().sum() + _with_its_transpose(z, t),
    "tail": lambda z, t: F.cross_entropy(z[:32] * z[32:], t[:32]),
    "halves": lambda z, t: F.cross_entropy(z[:32] * torch.cat(z.chunk(2)[::-1])[:32], t[:32]),
    "columns": lambda z, t: F.cross_entropy(z.view(32, 2, 64)[:, 0] + z[32:], t[:32]),
    "detached": lambda z, t: F.cross_entropy(z * z.detach(), t),
    "detached and transposed": lambda z, t: F.cross_entropy(z * z.detach().t(), t),
}


@pytest.mark.parametrize("kind", OTHER_ROWS)
def test_T11_rows_that_lie_elsewhere_in_another_view_are_not_overwritten(kind: str) -> None:  # noqa: N802
    torch.manual_seed(0)
    model = Made(lambda m, x, t: OTHER_ROWS[kind](m.linear(x), t), linear=nn.Linear(32, 64))
    args = torch.randn(64, 32), torch.randint(64, (64,))
    compiled = memplan.compile(model, args, divide=8, kernels="aten", sanitize="poison")
    assert any("_rows1" in op.name for op in compiled.plan.graph.ops)
    reference = outcome_of(model, model, *args, seed=1)
    assert outcome_of(model, compiled, *args, seed=1).same_as(reference)


# -- what users see ----------------------------------------------------------------------------------------------


def test_T11_a_target_that_is_no_class_is_refused_as_in_eager() -> None:  # noqa: N802
    model, args = _masked()
    compiled = memplan.compile(model, args, divide=4)
    labels = args[1].clone()
    labels[0, 0] = VOCABULARY
    for run in (model, compiled):
        with pytest.raises(IndexError, match=f"Target {VOCABULARY} is out of bounds"):
            run(args[0], labels)


def test_T11_nothing_is_divided_where_nothing_must_be() -> None:  # noqa: N802
    model, args = _masked()
    assert memplan.plan(model, args, arena_budget="100%", divide=True, policy=QUICK).division is None
    assert memplan.plan(model, args, divide=True).division is None


@pytest.mark.parametrize(
    "wrong", [{"blocks": "4"}, {"blocks": 2.5}, {"sums": "no"}, {"blocks": 2, "over": 1.5}], ids=str
)
def test_T11_a_division_of_other_things_than_numbers_is_refused(wrong: dict[str, Any]) -> None:  # noqa: N802
    with pytest.raises(InvalidSize, match="divide"):
        Division(**wrong)
