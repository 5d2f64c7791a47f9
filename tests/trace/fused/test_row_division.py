"""Loss heads in blocks of rows: where tokens are rows, and the sums into the rows of an embedding beside them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import config

import memplan
from memplan.trace.fused import row_division
from memplan.trace.fused.deferred import DeferringCompile
from tests.slow import slow

BLOCKS = memplan.Division(blocks=8, sums=True)
WORDS, WIDTH = 2048, 32


class NextToken(nn.Module):
    """Predicts each token from those before it; the logits of the last one are left out."""

    def __init__(self, *, tied: bool = True, bias: bool = False, from_end: bool = False) -> None:
        super().__init__()
        self.from_end = from_end
        self.table, self.body = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=bias)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        words = self.table.weight[ids - WORDS] if self.from_end else self.table(ids)
        logits = self.head(self.body(words).relu())
        wanted = ids[1:] if ids.dim() == 1 else ids[:, 1:]
        left = logits[:-1] if ids.dim() == 1 else logits[:, :-1]
        return nn.functional.cross_entropy(left.reshape(-1, WORDS).float(), wanted.reshape(-1))


def _step(model: nn.Module, shape: tuple[int, ...], divide: Any) -> tuple[memplan.Plan, list[torch.Tensor]]:
    """The plan of a step, its loss and its gradients."""
    torch.manual_seed(1)
    ids = torch.randint(WORDS, shape)
    compiled = memplan.compile(model, ids, kernels="inductor", divide=divide, sanitize="poison")
    loss = compiled(ids)
    loss.backward()
    return compiled.plan, [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize(
    ("shape", "tied", "bias", "dtype"),
    [
        ((2, 64), True, False, torch.bfloat16),
        slow((2, 64), False, True, torch.float32),
        slow((1, 128), True, True, torch.float32),
        slow((128,), False, False, torch.bfloat16),
        slow((4, 4, 8), True, False, torch.float32),
    ],
)
def test_tokens_are_rows_and_a_table_has_one_block_of_sums(
    shape: tuple[int, ...], tied: bool, bias: bool, dtype: torch.dtype
) -> None:
    """The batch has two samples, or one; no tensor of all logits exists, nor one of 32-bit sums for all words."""
    model = NextToken(tied=tied, bias=bias).to(dtype)
    _, expected = _step(copy.deepcopy(model), shape, False)
    plan, found = _step(model, shape, BLOCKS)
    results = {plan.graph.values[v].storage for v in (*plan.graph.outputs, *plan.graph.gradients)}
    most = max(s.nbytes for i, s in enumerate(plan.graph.storages) if s.planned and i not in results)
    assert most <= WORDS * WIDTH * dtype.itemsize  # the head's gradient, which the forward computes
    assert most < 128 * WORDS * dtype.itemsize // 2
    for one, two in zip(found, expected, strict=True):
        near = 2e-2 if dtype is torch.bfloat16 else 1e-4
        torch.testing.assert_close(one, two, rtol=near, atol=near * float(two.abs().max()))


@pytest.mark.slow
def test_sums_of_a_table_have_the_bits_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = NextToken()
    twin = copy.deepcopy(model)
    _, divided = _step(model, (2, 64), BLOCKS)
    monkeypatch.setattr(row_division, "divide_row_sums", lambda *_, **__: None)
    torch.compiler.reset()
    _, whole = _step(twin, (2, 64), memplan.Division(blocks=8, sums=True))
    assert all(torch.equal(one, two) for one, two in zip(divided, whole, strict=True))


def test_blocks_of_rows_and_of_words_share_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks have nothing more to compile but what makes the rows of the product's operand."""
    made: list[set[str]] = []
    original = DeferringCompile.cpp_pybinding

    def noted(self: DeferringCompile, types: list[str], source: str) -> Any:
        made[-1].add(source)
        return original(self, types, source)

    monkeypatch.setattr(DeferringCompile, "cpp_pybinding", noted)
    ids = torch.randint(WORDS, (2, 65))
    for blocks in (16, 32):
        made.append(set())
        torch.compiler.reset()
        division = memplan.Division(blocks=blocks, sums=True)
        with config.patch(force_disable_caches=True):
            plan = memplan.plan(NextToken(tied=False), ids, kernels="inductor", divide=division)
        assert sum("slice_copy" in op.target for op in plan.graph.ops) == 2 * blocks
    assert len(made[1]) - len(made[0]) <= 16


def _whole_samples(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return logits.reshape(4, -1)[:-1].square().mean()


def _plus_a_matrix(logits: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    return (
        torch.addmm(matrix.repeat(1, WORDS // WIDTH), logits, torch.eye(WORDS))
        .view(4, -1, WORDS)[:, 1:]
        .logsumexp(2)
        .sum()
    )


def _read_twice(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return logits[:-1].logsumexp(1).sum() + logits.mean()


def _classes_first(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    left = logits.view(4, -1, WORDS)[:, :-1].transpose(1, 2)
    return nn.functional.cross_entropy(left, torch.arange(60).view(4, 15))


def _nothing_left(logits: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return logits.view(64, 1, WORDS)[:, :-1].sum() + logits.logsumexp(1).sum()


@pytest.mark.parametrize(
    "loss", [_classes_first, *map(slow, (_whole_samples, _plus_a_matrix, _read_twice, _nothing_left))]
)
def test_other_heads_are_right(loss: Any) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(WIDTH, WORDS, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = loss(self.head(x), x)
            return found

    model, x = Head(), torch.randn(64, WIDTH)
    memplan.compile(model, x, kernels="inductor", divide=BLOCKS)(x).backward()
    found, model.head.weight.grad = model.head.weight.grad, None
    model(x).backward()
    torch.testing.assert_close(found, model.head.weight.grad, rtol=1e-4, atol=1e-5)


def test_rows_may_be_counted_from_the_end() -> None:
    """`table[-1]` is the last row, in its gradient too."""
    model, ids = NextToken(from_end=True), torch.arange(128).view(2, 64) * 7 % WORDS
    memplan.compile(model, ids, kernels="inductor", divide=BLOCKS)(ids).backward()
    found, model.table.weight.grad = model.table.weight.grad, None
    model(ids).backward()
    torch.testing.assert_close(found, model.table.weight.grad, rtol=1e-4, atol=1e-6)
