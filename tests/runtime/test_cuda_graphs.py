"""`cuda_graph=True`: the protocol of recording and replaying, on any device by a recorder that runs the step again."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree

from benchmarks.zoo import ZOO
from memplan.core.choices import Gradients
from memplan.errors import MemplanError, UnsupportedCall, UnsupportedGraph
from memplan.runtime import compile, compile_step
from memplan.runtime.execute import recorders
from tests.steps import outcome_of


class Rerun:
    """Records by remembering the function: a replay runs it, and leaves its results in the memory of the first."""

    pool_bytes = 17

    def __init__(self) -> None:
        self.recorded = 0

    def warm_up(self, function: Callable[[], Any]) -> None:
        function()

    def record(self, function: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        results = function()

        def replay() -> None:
            with torch.no_grad():
                for old, new in zip(pytree.tree_leaves(results), pytree.tree_leaves(function()), strict=True):
                    if old is not new:
                        old.copy_(new)

        return replay, results


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Rerun:
    made = Rerun()
    for module in ("memplan.runtime.api.builder", "memplan.runtime.api.step_builder"):
        monkeypatch.setattr(f"{module}.make_recorder", lambda device, sanitize: made)
    return made


@pytest.mark.parametrize("name", ["lstm", "resnet", "gpt2"])
@pytest.mark.parametrize("gradients", ["outside"])
def test_replays_are_the_steps_themselves(name: str, gradients: Gradients, recorder: Rerun) -> None:
    """Dropout, running statistics and accumulated gradients included."""
    model, args = ZOO[name]("nano")
    other = copy.deepcopy(model)
    recorded = compile(model, args, cuda_graph=True, gradients=gradients)
    for seed in range(4):
        losses = []
        for call in (recorded, other):
            torch.manual_seed(seed)
            loss = call(*args)
            (loss * 2).backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
        for (key, p), (_, q) in zip(model.named_parameters(), other.named_parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), key
            assert p.grad is None or torch.equal(p.grad, q.grad), key  # type: ignore[arg-type]
        for (key, b), (_, c) in zip(model.named_buffers(), other.named_buffers(), strict=True):
            assert torch.equal(b, c), key
        if seed == 1:
            for m in (model, other):
                m.zero_grad()
    assert recorder.recorded == 2
    assert recorded.pool_bytes == 17
    with torch.no_grad():
        recorded(*args)
    assert recorded.pool_bytes == 2 * 17, "of each program"


def test_results_are_the_callers_and_moved_parameters_are_recorded_anew(recorder: Rerun) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    compiled = compile(net, torch.randn(3, 4), cuda_graph=True)
    x, y = torch.randn(2, 3, 4)
    one = compiled(x)
    before = one.detach().clone()
    one.sum().backward()
    compiled(y).sum().backward()
    assert torch.equal(one, before)
    weight = net.get_parameter("0.weight")
    weight.data = weight.data.clone() * 2
    assert torch.equal(compiled(x), net(x))
    assert recorder.recorded == 4


def test_a_step_that_is_recorded_anew_has_the_random_numbers_of_its_seed(recorder: Rerun) -> None:
    """The model has dropout, and a result of the recording before is held."""
    model, args = ZOO["mlp"]("nano")
    compiled = compile(model, args, cuda_graph=True)
    held = compiled(*args)
    held.backward()
    before, recorded = held.detach().clone(), recorder.recorded
    for p in model.parameters():
        p.data = p.data.clone() * 0.5
    eager = copy.deepcopy(model)
    for seed in range(2):
        assert outcome_of(model, compiled, *args, seed=seed).same_as(outcome_of(eager, eager, *args, seed=seed))
    assert recorder.recorded > recorded
    assert torch.equal(held, before)


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 4))


def _batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(5, 8, generator=generator), torch.randn(5, 4, generator=generator)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_a_recorded_step_follows_its_schedule(make: Any, accumulate: int, recorder: Rerun) -> None:
    net, other = _net(), _net()
    groups = [[{"params": n[0].parameters()}, {"params": n[2].parameters(), "lr": 0.125}] for n in (net, other)]
    ours, theirs = (make(g, lr=0.5, fused=True) for g in groups)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (ours, theirs)]
    step = compile_step(net, ours, F.mse_loss, _batch(), cuda_graph=True, accumulate=accumulate)
    plain = compile_step(other, theirs, F.mse_loss, _batch(), accumulate=accumulate)
    for seed in range(6 * accumulate):
        losses = []
        for one in (step, plain):
            torch.manual_seed(seed)
            losses.append(one(*_batch(seed)))
        assert torch.equal(*losses)
        if step.pending == 0:
            for schedule in schedules:
                schedule.step()
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert recorder.recorded == accumulate
    for o in (ours, theirs):
        o.param_groups[0]["weight_decay"] = 0.25
    for one in (step, plain):
        for seed in range(accumulate):
            torch.manual_seed(seed)
            one(*_batch(seed))
    assert all(torch.equal(p, q) for p, q in zip(net.parameters(), other.parameters(), strict=True))
    assert recorder.recorded > accumulate


def test_workspaces_of_products_are_made_in_the_recordings_own_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `CudaRecorder`, without a device: what would be captured, and when torch's own workspaces are given up."""
    seen: list[str] = []

    class Capture:
        def __init__(self, graph: Any, **options: Any) -> None:
            self.pool = options["pool"]

        def __enter__(self) -> None:
            seen.append(f"capture in {self.pool}")

        def __exit__(self, *_: object) -> None:
            pass

    class Graph:
        def replay(self) -> None:
            pass

    handles = iter(((0, 1), (0, 2)))
    for name, fake in {
        "CUDAGraph": Graph,
        "Stream": lambda device: None,
        "graph": Capture,
        "graph_pool_handle": lambda: next(handles),
        "device": lambda device: nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: seen.append("workspaces are cleared"), raising=False)
    recorder = recorders.CudaRecorder(torch.device("cpu"))
    replay, results = recorder.record(lambda: seen.append("the step"))
    cleared, products = "workspaces are cleared", "capture in (0, 2)"
    assert seen == [cleared, products, products, "the step", cleared]
    with pytest.raises(ZeroDivisionError):
        recorder.record(lambda: 1 / 0)
    assert seen[5:] == [cleared, products, products, cleared]
    assert (replay, results) == (next(iter(recorder._graphs)).replay, None)


def test_bytes_of_a_pool_are_those_of_its_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """`CudaRecorder` counts, without a device, what torch's allocator would list."""
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    recorder = recorders.CudaRecorder(torch.device("cpu"))
    segments = [((0, 1), 64), ((0, 1), 20), ((0, 9), 4096)]  # the last is somebody else's
    listed = [{"segment_pool_id": pool, "total_size": size} for pool, size in segments]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: listed)
    assert recorder.pool_bytes == 64 + 20


def test_what_cannot_be_recorded_says_so() -> None:
    with pytest.raises(UnsupportedCall, match="CUDA device"):
        compile(_net(), _batch()[0], cuda_graph=True)
    with pytest.raises(MemplanError, match="redzone"):
        recorders.make_recorder(torch.device("cuda"), "redzone")


def test_inputs_that_are_changed_are_refused(recorder: Rerun) -> None:
    class Changes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(1)
            return x * self.w

    with pytest.raises(UnsupportedGraph, match="is changed"):
        compile(Changes(), torch.ones(4), cuda_graph=True)
