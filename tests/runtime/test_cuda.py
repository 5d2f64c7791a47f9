"""On a CUDA device: the arena, random numbers, recordings, and measured memory against the plan's prediction."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.zoo import ZOO
from memplan.runtime import compile, compile_step

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is available"),
]
NAMES = ["mlp", "gpt2", "bert", "resnet"]


def _example(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    model, args = ZOO[name]("nano")
    return model.to("cuda"), pytree.tree_map_only(torch.Tensor, lambda t: t.to("cuda"), args)


def _close(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.allclose(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_trains_like_eager(name: str, cuda_graph: bool) -> None:
    model, args = _example(name)
    eager = copy.deepcopy(model)
    compiled = compile(model, args, cuda_graph=cuda_graph)
    assert compiled.plan.alignment == 512
    for seed in range(4):
        losses = []
        for one in (compiled, eager):
            torch.manual_seed(seed)
            loss = one(*args)
            loss.backward()
            losses.append(loss.detach())
        assert _close(*losses), "same seed, same dropout"
    for (key, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert p.grad is None or _close(p.grad, q.grad), key  # type: ignore[arg-type]
    if cuda_graph:
        assert compiled.pool_bytes > 0


@pytest.mark.parametrize("cuda_graph", [False, True])
def test_whole_steps_follow_their_schedule(cuda_graph: bool) -> None:
    model, args = _example("gpt2")
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3, fused=True) for m in (model, eager))
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    step = compile_step(model, ours, lambda loss: loss, args, cuda_graph=cuda_graph)
    for seed in range(4):
        torch.manual_seed(seed)
        one = step(*args)
        torch.manual_seed(seed)
        theirs.zero_grad()
        two = eager(*args)
        two.backward()
        theirs.step()
        assert _close(one, two.detach())
        for schedule in schedules:
            schedule.step()
    assert all(_close(p, q) for p, q in zip(model.parameters(), eager.parameters(), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_measured_peak_is_the_predicted_one(name: str) -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model, args = _example(name)
    compiled = compile(model, args)
    for _ in range(3):
        model.zero_grad()
        compiled(*args).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    compiled(*args).backward()
    measured = torch.cuda.max_memory_allocated() - before
    small = 512 * (len(list(model.parameters())) + len(compiled.plan.graph.storages))  # the allocator's rounding
    assert abs(measured - compiled.plan.total) <= 0.02 * compiled.plan.total + small
