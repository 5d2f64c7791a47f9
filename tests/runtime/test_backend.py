"""`torch.compile(backend="memplan")`: graph breaks, several calls in flight, other shapes, against eager."""

from __future__ import annotations

import copy
import gc
import importlib
import pickle
import threading
import tomllib
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.errors import BudgetInfeasible
from memplan.runtime.dynamo.backend import Backend
from tests.models import Halves
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.slow import slow
from tests.steps import gradients_of

# Dynamo itself looks at .grad of what one graph hands to the next.
pytestmark = [
    pytest.mark.usefixtures("fresh_dynamo"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
]


def _train(model: nn.Module, call: Any, batches: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The losses of some steps, gradients accumulated over two of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        loss = call(*batch).abs().mean()
        loss.backward()
        losses.append(loss.detach())
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
    return losses


def _assert_trains_like_eager(model: nn.Module, batches: list[tuple[Any, ...]], backend: Backend) -> None:
    eager = copy.deepcopy(model)
    ours = _train(model, torch.compile(model, backend=backend), batches)
    theirs = _train(eager, eager, batches)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-4, atol=1e-5)


class Broken(nn.Module):
    """Two parts with a graph break between them, and an output of the first that the second uses twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU())
        self.two = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.2), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        torch._dynamo.graph_break()
        loss: torch.Tensor = (self.two(hidden) + hidden.sum(1, keepdim=True)).square().mean()
        return loss


def test_a_graph_break_gives_two_planned_graphs() -> None:
    torch.manual_seed(0)
    backend = Backend(sanitize="poison")
    _assert_trains_like_eager(Broken(), [(torch.randn(4, 8),) for _ in range(5)], backend)
    assert len(backend.graphs) == 2
    plans = [graph.plans[0] for graph in backend.graphs]
    assert all(plan.arena_size == plan.max_live for plan in plans)
    one, two = (graph.instances[0].runner.arena for graph in backend.graphs)
    assert one.memory is two.memory, "one arena for both"
    assert max(plan.arena_size for plan in plans) <= backend.arena_size <= sum(plan.arena_size for plan in plans)


def _twice() -> nn.Module:
    """One layer in two graphs, in both of which it gets a gradient."""
    layer = nn.Linear(8, 8)
    return Halves(nn.Sequential(layer, nn.Tanh()), layer)


@pytest.mark.parametrize("make", [slow(Broken), _twice])
def test_gradients_outside_train_like_eager(make: Any) -> None:
    torch.manual_seed(0)
    backend = Backend(sanitize="poison", gradients="outside")
    _assert_trains_like_eager(make(), [(torch.randn(4, 8),)] * 4, backend)
    assert all(not plan.graph.gradients_in_arena for graph in backend.graphs for plan in graph.plans)


class Layer(nn.Module):
    """Dynamo compiles its forward once for all layers, which then are in flight together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        hidden: torch.Tensor = self.linear(x)
        return x + hidden.tanh()


def test_layers_that_share_a_graph_keep_their_activations() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(8, 1), nn.Flatten(0))
    backend = Backend(sanitize="poison", gradients="outside")
    inputs = [torch.randn(4, 8) for _ in range(4)]
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    _assert_same_gradients(model, eager, compiled, *inputs[:2])
    instances = sum(len(graph.instances) for graph in backend.graphs)
    for x in inputs:
        _assert_same_gradients(model, eager, compiled, x)
    assert sum(len(graph.instances) for graph in backend.graphs) == instances, "instances are used again"


def test_threads_share_no_arena() -> None:
    torch.manual_seed(0)
    backend = Backend()
    models = [Broken().eval() for _ in range(2)]
    eager = [copy.deepcopy(model) for model in models]
    compiled = [torch.compile(model, backend=backend) for model in models]
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for model, call in zip(models, compiled, strict=True):
        call(batches[0]).backward()  # dynamo compiles in one thread
        model.zero_grad()
    tracing, traced = threading.Lock(), threading.Barrier(len(models), timeout=60)

    def work(call: Any) -> None:
        with tracing:  # torch cannot trace in one thread while another calls what dynamo made
            for batch in batches[:2]:
                call(batch).backward()
        traced.wait()
        for batch in batches[2:]:
            call(batch).backward()

    with ThreadPoolExecutor(len(models)) as threads:
        list(threads.map(work, compiled))
    for model, other in zip(models, eager, strict=True):
        for batch in batches:
            other(batch).backward()
        torch.testing.assert_close(gradients_of(model), gradients_of(other), rtol=1e-5, atol=1e-6)


def _assert_same_gradients(model: nn.Module, eager: nn.Module, call: Any, *inputs: torch.Tensor) -> None:
    """After a step of both, whose loss has a term for each of the inputs."""
    for one in (call, eager):
        sum(one(x).sum() for x in inputs).backward()
    torch.testing.assert_close(gradients_of(model), gradients_of(eager), rtol=1e-5, atol=1e-6)


def _deep() -> nn.Module:
    """Two parts that save much."""
    one, two = (nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(32, 32), nn.Tanh(), nn.GELU()))) for _ in "12")
    return Halves(one, two)


@pytest.mark.parametrize("policy", [QUICK, slow(QUICK_RECOMPUTE)], ids=["offload", "recompute"])
def test_each_graph_keeps_the_budget(policy: Any) -> None:
    """Graphs in one arena, whose activations leave and come back while others run."""
    torch.manual_seed(0)
    model = _deep()
    eager, x = copy.deepcopy(model), torch.randn(64, 32)
    backend = Backend(sanitize="poison", arena_budget=0.7, policy=policy, costs=FAST_LINK)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        _assert_same_gradients(model, eager, compiled, x)
    plans = [plan for graph in backend.graphs for plan in graph.plans]
    kept = [plan for plan in plans if plan.eviction is not None]
    assert any(plan.evictions for plan in kept)
    assert all(plan.arena_size <= plan.eviction.arena_budget for plan in kept if plan.eviction)
    assert backend.arena_size


def test_a_budget_that_no_plan_keeps_says_so() -> None:
    compiled = torch.compile(
        nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8)), backend=Backend(arena_budget=64)
    )
    with pytest.raises(BudgetInfeasible) as caught:
        compiled(torch.randn(4, 8)).sum().backward()
    assert caught.value.smallest > 64
    with pytest.raises(memplan.MemplanError, match="sanitize"):
        Backend(sanitize="poisson")  # type: ignore[arg-type]


def test_hooks_see_the_steps_of_all_graphs() -> None:
    backend = Backend()
    compiled = torch.compile(Broken(), backend=backend)
    seen: list[Any] = []
    with backend.hooks.add(seen.append):
        compiled(torch.randn(4, 8)).backward()
    steps = {len(instance.plan.graph.ops) for graph in backend.graphs for instance in graph.instances}
    assert {event.steps for event in seen} == steps
    assert {event.phase for event in seen} == {"forward", "backward"}


def test_other_shapes_get_plans_of_their_own(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="memplan")
    torch.manual_seed(0)
    backend = Backend(sanitize="poison")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for rows in (4, 6, 5, 4, 6, 7):
        x = torch.randn(rows, 8)
        _assert_same_gradients(model, eager, compiled, x)
    plans = [plan for graph in backend.graphs for plan in graph.plans]
    assert len({plan.arena_size for plan in plans}) > 1
    again = [record.message for record in caplog.records if "is planned again" in record.message]
    assert "size mismatch at index 0" in again[0]
    assert "for other sizes: [(5, 8)]" in again[1]


def test_inference_has_no_backward_in_its_plan() -> None:
    torch.manual_seed(0)
    backend = Backend()
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(), nn.ReLU(), nn.Linear(16, 1)).eval()
    compiled = torch.compile(model, backend=backend)
    x = torch.randn(4, 8)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(compiled(x), model(x))
            assert torch.equal(compiled(x), model(x))
    assert all(not plan.graph.gradients for graph in backend.graphs for plan in graph.plans)


def test_inputs_that_change_and_outputs_that_are_inputs() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y.add_(1)
        return x, y[1:], (x * y).sum()

    compiled = torch.compile(function, backend=Backend(sanitize="poison"))
    x, y = torch.randn(3, requires_grad=True), torch.zeros(3)
    for count in (1, 2):
        same, view, total = compiled(x, y)
        assert same is x
        assert torch.equal(y, torch.full((3,), float(count)))
        assert view.data_ptr() == y[1:].data_ptr()
        total.backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((3,), float(count)))
        x.grad = None


def test_torch_finds_the_backend_by_name() -> None:
    """Check the entry point of an installation, which is that of pyproject.toml."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (name,) = project["entry-points"]["torch_dynamo_backends"]
    assert name == "memplan"
    module, _, function = project["entry-points"]["torch_dynamo_backends"][name].partition(":")
    assert torch._dynamo.lookup_backend(name) is getattr(importlib.import_module(module), function)


def test_a_copy_of_what_was_compiled_is_compiled_by_a_backend_of_its_own() -> None:
    net, x = nn.Sequential(nn.Linear(8, 4), nn.Tanh()), torch.randn(3, 8)
    backend = Backend(sanitize="poison", gradients="outside")
    compiled: Any = torch.compile(net, backend=backend)
    compiled(x).sum().backward()
    twin = copy.deepcopy(compiled)
    twin(x).sum().backward()
    for p, q in zip(compiled.parameters(), twin.parameters(), strict=True):
        assert p is not q
        assert torch.equal(q.grad, p.grad)
    assert len(backend.graphs) == 1
    (other,) = pickle.loads(pickle.dumps([backend]))
    assert (other._options, other.graphs) == (backend._options, ())


def test_the_first_batch_is_not_kept() -> None:
    """The first batch is kept by no graph, copy of a program for a second call in flight, or shared arena."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    eager = copy.deepcopy(model)
    backend = memplan.Backend()
    compiled = torch.compile(model, backend=backend)
    for calls in (1, 2, 2):
        arrays = [torch.randn(6, 8).numpy() for _ in range(calls)]
        batches, kept = [torch.from_numpy(array) for array in arrays], [weakref.ref(array) for array in arrays]
        losses = [sum(call(x).square().sum() for x in batches) for call in (compiled, eager)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        grads = [[p.grad for p in net.parameters() if p.grad is not None] for net in (model, eager)]
        assert len(grads[0]) == 4
        assert all(map(torch.equal, *grads))
        del grads, arrays, batches, losses, loss
        gc.collect()
        assert all(ref() is None for ref in kept), "something keeps the bytes of a batch"
    assert max(len(graph.instances) for graph in backend.graphs) == 2


class Masked(nn.Module):
    """A model that hides a part of a weight, by a mask that can be replaced."""

    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.renew(0)

    def renew(self, rows: int) -> None:
        """Hide some rows, as another kind of layer: dynamo traces it again."""
        mask = torch.ones(32, 1)
        mask[:rows] = 0.0
        self.register_buffer("mask", mask)
        self.label = "x" * rows  # a number would be a symbol the second time

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x) * self.mask.t() * (1.0 + len(self.label))
        result: torch.Tensor = self.second(hidden.relu())
        return result


def test_a_backward_that_waits_keeps_the_tensors_of_its_call() -> None:
    torch.manual_seed(0)
    model, backend = Masked(), Backend()
    call = torch.compile(model, backend=backend)
    x = torch.randn(8, 16)
    loss = call(x).square().mean()
    expected = torch.autograd.grad(model(x).square().mean(), list(model.parameters()))
    mask = weakref.ref(model.mask)
    model.renew(3)
    for _ in range(3):
        call(x).square().mean().backward()
    model.zero_grad()
    loss.backward()
    for one, parameter in zip(expected, model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.equal(one, parameter.grad)
    there = [mask() is not None]
    del loss
    model.renew(6)
    for _ in range(3):
        call(x).square().mean().backward()
    gc.collect()
    there.append(mask() is not None)
    assert there == [True, False]
