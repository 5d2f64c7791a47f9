"""Inductor's kernels in the arena on a CUDA device: the bits of `torch.compile`, within its peak.

`scripts/gpu_suite.sh` runs these on a machine with a GPU; everywhere else they are skipped.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.runtime.on_cuda import example_on_cuda, same_kernels_each_time
from tests.steps import loss_of

pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
    pytest.mark.filterwarnings("ignore:.*deterministic"),
]


@pytest.fixture(autouse=True)
def _same_kernels_each_time() -> Iterator[None]:
    with same_kernels_each_time():
        yield


class Stack(nn.Module):
    """Layers whose activations are most of the step, with dropout."""

    def __init__(self, width: int = 64, layers: int = 6) -> None:
        super().__init__()
        made = ((nn.Linear(width, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)) for _ in range(layers))
        self.layers = nn.Sequential(*(layer for some in made for layer in some))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).square().mean()
        return loss


def _stack() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return Stack().cuda(), torch.randn(512, 64, device="cuda")


def _assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, p), (_, q) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        assert p.grad is None or torch.equal(p.grad, q.grad), name  # type: ignore[arg-type]
    for (name, mine), (_, its) in zip(one.named_buffers(), other.named_buffers(), strict=True):
        assert torch.equal(mine, its), name


@pytest.mark.parametrize("name", ["mlp", "gpt2", "llama", "bert", "vit", "resnet"])
def test_the_bits_are_inductors(name: str) -> None:
    model, args = example_on_cuda(name)
    other = copy.deepcopy(model)
    ours = memplan.compile(model, args, kernels="inductor", sanitize="poison")
    assert ours.plan.alignment == 512
    assert any("triton" in op.target for op in ours.plan.graph.ops)
    theirs = torch.compile(other, fullgraph=True)
    for seed in range(3):
        model.zero_grad()
        other.zero_grad()  # torch's own gradients may share bytes, and then add up wrongly over several steps
        assert torch.equal(loss_of(ours, *args, seed=seed), loss_of(theirs, *args, seed=seed))
        _assert_same(model, other)


def _assert_same_steps(ours: Any, model: nn.Module, theirs: Any, other: nn.Module, x: torch.Tensor) -> None:
    for seed in range(3):
        assert torch.equal(loss_of(ours, x, seed=seed), loss_of(theirs, x, seed=seed))
    _assert_same(model, other)


@pytest.mark.parametrize("policy", [QUICK, QUICK_RECOMPUTE], ids=["offload", "recompute"])
def test_a_budget_changes_no_bit(policy: Any) -> None:
    model, x = _stack()
    other = copy.deepcopy(model)
    plain = memplan.compile(model, x, kernels="inductor")
    size = int(plain.plan.arena_size * 0.7)
    kept = memplan.compile(other, x, kernels="inductor", arena_budget=size, policy=policy, costs=FAST_LINK)
    assert kept.plan.arena_size <= size
    _assert_same_steps(kept, other, plain, model, x)


def test_a_recorded_step_has_the_same_bits() -> None:
    model, x = _stack()
    other = copy.deepcopy(model)
    plain = memplan.compile(model, x, kernels="inductor")
    recorded = memplan.compile(other, x, kernels="inductor", cuda_graph=True)
    _assert_same_steps(recorded, other, plain, model, x)


def test_whole_steps_train_like_inductors() -> None:
    model, x = _stack()
    other = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, other))
    step = memplan.compile_step(model, ours, lambda loss: loss, x, kernels="inductor")
    compiled = torch.compile(other, fullgraph=True)
    for seed in range(3):
        torch.manual_seed(seed)
        one = step(x)
        torch.manual_seed(seed)
        two = compiled(x)
        two.backward()
        theirs.step()
        theirs.zero_grad()
        assert torch.equal(one, two)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def test_an_input_may_begin_at_any_address() -> None:
    model, x = _stack()
    model.eval()
    ours = memplan.compile(model, x, train=False, kernels="inductor")
    expected = ours(x).clone()
    apart = torch.empty(x.numel() + 1, device="cuda")[1:].view_as(x).copy_(x)
    assert apart.data_ptr() % 16
    assert torch.equal(ours(apart), expected)


def test_the_backend_runs_inductors_kernels() -> None:
    model, x = _stack()
    other = copy.deepcopy(model)
    ours = torch.compile(model, backend=memplan.Backend(kernels="inductor"))
    _assert_same_steps(ours, model, torch.compile(other, fullgraph=True), other, x)


def test_kernels_run_on_the_present_stream() -> None:
    model, x = _stack()
    model.eval()
    ours = memplan.compile(model, x, train=False, kernels="inductor")
    expected = ours(x).clone()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # type: ignore[no-untyped-call]
        late.copy_(x)
        found = ours(late)
    torch.cuda.synchronize()
    assert torch.equal(found, expected)
