"""Beyond Capuchin: activations that wait in fewer bytes (row P9), as far as that loses nothing: masks, as bits."""

from __future__ import annotations

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
from memplan.core.compressed_storages import PACKED
from memplan.core.evictions import Action
from memplan.errors import InvalidSize
from memplan.trace.capture.joint_graph import capture
from memplan.trace.passes.compression import pack_masks
from memplan.trace.passes.rewrite import copy_of
from tests.runtime.budgets import QUICK
from tests.steps import outcome_of


class Dropping(nn.Module):
    """Blocks whose masks wait for the backward."""

    def __init__(self, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            y = layer(x)
            x = F.dropout(torch.where(y > 0.1, y, -x), 0.3, self.training)
        return x.square().mean()


def _example() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return Dropping(), torch.randn(64, 32)


@pytest.mark.parametrize("options", [{}, {"arena_budget": "70%", "policy": QUICK}])
def test_P9_packed_masks_give_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:  # noqa: N802
    model, x = _example()
    reference = outcome_of(model, memplan.compile(model, x), x, seed=1)
    packed = memplan.compile(model, x, compress="bits", sanitize="poison", **options)
    for _ in range(2):
        assert outcome_of(model, packed, x, seed=1).same_as(reference)
    packed.plan.save(tmp_path / "plan.json")
    assert outcome_of(model, memplan.compile(model, x, plan=tmp_path / "plan.json"), x, seed=1).same_as(reference)


def test_P9_a_whole_step_packs_too() -> None:  # noqa: N802
    losses = []
    for compress in (None, "bits"):
        model, x = _example()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = memplan.compile_step(model, optimizer, lambda loss: loss, x, compress=compress, sanitize="poison")
        torch.manual_seed(1)
        losses.append(torch.stack([step(x) for _ in range(3)]))
    assert torch.equal(*losses)


def test_P9_what_waits_is_an_eighth_and_the_plan_says_when_it_is_back() -> None:  # noqa: N802
    model, x = _example()
    whole, packed = memplan.plan(model, x), memplan.plan(model, x, compress="bits")
    assert packed.max_live < whole.max_live
    assert whole.evictions == ()
    assert packed.evictions
    names = [packed.graph.ops[i].name for i in packed.schedule.order]
    for e in packed.evictions:
        assert e.action is Action.COMPRESS
        assert e.nbytes == x.numel()
        assert e.evicted_access < e.in_trigger < e.back_access
    bits = [op for op in packed.graph.ops if PACKED in op.name]
    assert len(bits) == len(packed.evictions)
    for op in bits:
        assert packed.graph.storages[packed.graph.written(op)[0]].nbytes == x.numel() // 8
        assert names.index(op.name) < len(names) // 2


class Masked(nn.Module):
    """A mask of any shape, used in the backward, once by way of a view."""

    def forward(self, x: Tensor, limit: Tensor) -> Tensor:
        mask = x > limit
        flat = mask.view(-1)
        return (x.where(mask, -x) * 2).sum() + x.view(-1).where(flat, x.view(-1).sin()).sum()


@cache
def _captured(rows: int) -> Any:
    args = (torch.randn(rows, 8, requires_grad=True), torch.zeros(()))
    return capture(Masked(), args, {}, train=True)


@settings(max_examples=30)
@given(rows=st.integers(1, 5), seed=st.integers(0, 999), share=st.floats(0, 1))
def test_P9_any_mask_comes_back(rows: int, seed: int, share: float) -> None:  # noqa: N802
    captured = _captured(rows)
    graph = copy_of(captured.graph_module.graph)
    pack_masks(graph)
    graph.lint()
    assert any(PACKED in node.name for node in graph.nodes)
    x = torch.rand(rows, 8, generator=torch.Generator().manual_seed(seed))
    args = (x, torch.tensor(share), torch.ones(()))
    ours = fx.Interpreter(fx.GraphModule(captured.graph_module, graph)).run(*args, enable_io_processing=False)
    theirs = fx.Interpreter(captured.graph_module).run(*args, enable_io_processing=False)
    assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_P9_a_compression_that_is_not_known_is_refused() -> None:  # noqa: N802
    with pytest.raises(InvalidSize, match="compress"):
        memplan.plan(nn.Linear(2, 2), torch.ones(1, 2), compress="zip")  # type: ignore[call-overload]
