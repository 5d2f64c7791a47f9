"""`torch.compile(backend="memplan")`: graph breaks, several calls in flight, other shapes, against eager."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from benchmarks.zoo import ZOO
from memplan.core.choices import Gradients
from memplan.errors import BudgetInfeasible, StaleActivationsError
from memplan.runtime.dynamo.backend import Backend
from memplan.runtime.options import RunOptions
from tests.runtime.budgets import FAST_LINK, QUICK, QUICK_RECOMPUTE
from tests.slow import slow

# Dynamo itself looks at .grad of what one graph hands to the next.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _train(model: nn.Module, call: Any, batches: list[tuple[Any, ...]]) -> list[torch.Tensor]:
    """The losses of some steps, gradients accumulated over two of them."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        loss = call(*batch)
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
    for one, two in zip(ours, theirs, strict=True):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-6)
    for (name, p), (_, q) in zip(model.named_parameters(), eager.named_parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-4, atol=1e-5), name
    for (name, b), (_, c) in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.allclose(b, c, rtol=1e-4, atol=1e-5), name


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


@pytest.mark.parametrize("name", [slow("gpt2"), "resnet", slow("bert")])
def test_models_of_the_zoo_train_like_eager(name: str) -> None:
    model, inputs = ZOO[name]("nano")
    backend = Backend(sanitize="poison")
    _assert_trains_like_eager(model, [inputs] * 4, backend)
    assert sum(len(graph.plans) for graph in backend.graphs) == 1


@pytest.mark.parametrize("name", ["broken", "bert"])
def test_gradients_outside_train_like_eager(name: str) -> None:
    torch.manual_seed(0)
    model, inputs = (Broken(), (torch.randn(4, 8),)) if name == "broken" else ZOO[name]("nano")
    backend = Backend(sanitize="poison", gradients="outside")
    _assert_trains_like_eager(model, [inputs] * 4, backend)
    assert all(not plan.graph.gradients_in_arena for graph in backend.graphs for plan in graph.plans)


def test_gradients_of_parameters_that_two_graphs_share_add_up() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x).tanh()
            torch._dynamo.graph_break()
            last: torch.Tensor = self.layer(hidden)
            return last.square().mean()

    _assert_trains_like_eager(Twice(), [(torch.randn(4, 8),) for _ in range(4)], Backend(gradients="outside"))


class Layer(nn.Module):
    """Dynamo compiles its forward once for all layers, which then are in flight together."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        hidden: torch.Tensor = self.linear(x)
        return x + hidden.tanh()


@pytest.mark.parametrize("gradients", ["outside"])
def test_layers_that_share_a_graph_keep_their_activations(gradients: Gradients) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)), nn.Linear(8, 1), nn.Flatten(0))
    backend = Backend(sanitize="poison", gradients=gradients)
    inputs = [torch.randn(4, 8) for _ in range(4)]
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    _assert_same_gradients(model, eager, [compiled(x).sum() for x in inputs[:2]], [eager(x).sum() for x in inputs[:2]])
    instances = sum(len(graph.instances) for graph in backend.graphs)
    for x in inputs:
        _assert_same_gradients(model, eager, [compiled(x).sum()], [eager(x).sum()])
    assert sum(len(graph.instances) for graph in backend.graphs) == instances, "instances are used again"


class Block(nn.Module):
    """Needs much more while it runs than it saves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 256, bias=False), nn.Linear(256, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        hidden: torch.Tensor = self.up(x)
        out: torch.Tensor = self.down(hidden + 1 - hidden * 0.5)
        return x + out


def test_graphs_share_what_they_do_not_save() -> None:
    """One arena for a model in pieces needs what it needs as one graph, and a little."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(4)), nn.Flatten(0))
    eager, x = copy.deepcopy(model), torch.randn(32, 16)
    whole = memplan.plan(_unbroken(model), x).arena_size
    backend = Backend(sanitize="poison")
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        _assert_same_gradients(model, eager, [compiled(x).sum()], [eager(x).sum()])
    separate = sum(instance.plan.arena_size for graph in backend.graphs for instance in graph.instances)
    assert backend.arena_size < 0.7 * separate
    assert backend.arena_size <= 1.3 * whole


def _unbroken(model: nn.Sequential) -> nn.Module:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(m for m in model if isinstance(m, Block))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                assert isinstance(block, Block)
                hidden = block.up(x)
                x = x + block.down(hidden + 1 - hidden * 0.5)
            return x.sum()

    return Whole()


def test_another_order_is_noticed() -> None:
    """Two graphs that are laid out for one order of their backwards, run in the other: right, or an error."""
    torch.manual_seed(0)
    backend = Backend(sanitize="poison")
    eager = nn.ModuleList([nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)) for _ in range(2)])
    model = copy.deepcopy(eager)
    parts = [torch.compile(part, backend=backend, dynamic=False) for part in model]
    x = torch.randn(6, 8)
    for _ in range(3):  # first forward, second forward, second backward, first backward
        one, two = (part(x).square().sum() for part in parts)
        two.backward()
        one.backward()
    instances = [instance for graph in backend.graphs for instance in graph.instances]
    assert len({instance.runner.arena.memory for instance in instances}) < len(instances)
    model.zero_grad()
    one, two = (part(x).square().sum() for part in parts)
    one.backward()
    try:
        two.backward()
    except StaleActivationsError:
        return
    sum(part(x).square().sum() for part in eager).backward()
    for p, q in zip(eager.parameters(), model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


def test_graphs_kept_for_ever_do_not_grow_the_record() -> None:
    backend = Backend()
    kept = torch.compile(nn.Linear(4, 4), backend=backend)(torch.randn(3, 4))
    step = torch.compile(Broken().eval(), backend=backend)
    for _ in range(300):
        step(torch.ones(4, 8)).backward()
    assert len(backend._coordinators.of_this_thread()._events) <= 1024
    kept.sum().backward()


def test_threads_share_no_arena() -> None:
    torch.manual_seed(0)
    backend = Backend()
    models = [Broken() for _ in range(2)]
    eager = [copy.deepcopy(model) for model in models]
    compiled = [torch.compile(model, backend=backend) for model in models]
    batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(8)]
    for model in (*models, *eager):
        model.eval()
    for call in compiled:
        call(batches[0]).backward()  # dynamo compiles in one thread
    for model in models:
        model.zero_grad()
    errors: list[BaseException] = []
    tracing, traced = threading.Lock(), threading.Barrier(len(models), timeout=60)

    def work(call: Any) -> None:
        try:
            with tracing:  # torch cannot trace in one thread while another calls what dynamo made
                for batch in batches[:2]:
                    call(batch).backward()
            traced.wait()
            for batch in batches[2:]:
                call(batch).backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(call,)) for call in compiled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for model, other in zip(models, eager, strict=True):
        _assert_gradients_of(model, other, batches)


def _assert_gradients_of(model: nn.Module, eager: nn.Module, batches: list[torch.Tensor]) -> None:
    """The gradients that `model` has are those that eager sums up over `batches`."""
    for batch in batches:
        eager(batch).backward()
    for p, q in zip(model.parameters(), eager.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)


def _assert_same_gradients(one: nn.Module, two: nn.Module, ours: list[Any], theirs: list[Any]) -> None:
    sum(ours).backward()
    sum(theirs).backward()
    for p, q in zip(one.parameters(), two.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6)


class Deep(nn.Module):
    """Two parts that save much."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = (
            nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.GELU()) for _ in range(4))) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.one(x)
        torch._dynamo.graph_break()
        out: torch.Tensor = self.two(hidden)
        return out


@pytest.mark.parametrize("policy", [QUICK, QUICK_RECOMPUTE], ids=["offload", "recompute"])
def test_each_graph_keeps_the_budget(policy: Any) -> None:
    """Graphs in one arena, whose activations leave and come back while others run."""
    torch.manual_seed(0)
    model = Deep()
    eager, x = copy.deepcopy(model), torch.randn(64, 32)
    backend = Backend(sanitize="poison", arena_budget=0.7, policy=policy, costs=FAST_LINK)
    compiled = torch.compile(model, backend=backend)
    for _ in range(3):
        _assert_same_gradients(model, eager, [compiled(x).sum()], [eager(x).sum()])
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
    torch.manual_seed(0)
    backend = Backend()
    compiled = torch.compile(Broken(), backend=backend)
    x = torch.randn(4, 8)
    for _ in range(3):
        compiled(x).backward()
    seen: list[Any] = []
    with backend.hooks.add(seen.append):
        compiled(x).backward()
    graphs = {e.steps for e in seen}
    assert graphs == {len(instance.plan.graph.ops) for graph in backend.graphs for instance in graph.instances}
    assert {e.phase for e in seen} == {"forward", "backward"}
    count = len(seen)
    compiled(x).backward()
    assert len(seen) == count, "plain again"


def test_other_shapes_get_plans_of_their_own() -> None:
    torch.manual_seed(0)
    backend = Backend(sanitize="poison")
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for rows in (4, 6, 5, 4, 6, 7):
        x = torch.randn(rows, 8)
        _assert_same_gradients(model, eager, [compiled(x).sum()], [eager(x).sum()])
    plans = [plan for graph in backend.graphs for plan in graph.plans]
    assert len({plan.arena_size for plan in plans}) > 1


def test_options_are_checked_where_a_program_is_made_and_not_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = nn.Linear(4, 4), torch.randn(3, 4)
    compiled = torch.compile(model, backend=Backend())
    compiled(x).sum().backward()
    checked: list[RunOptions] = []

    def check(options: RunOptions) -> None:
        checked.append(options)

    monkeypatch.setattr(RunOptions, "__post_init__", check)
    for _ in range(3):
        compiled(x).sum().backward()
    assert not checked


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


def test_torch_finds_the_backend_by_name(tmp_path: Path) -> None:
    """As after an installation: a distribution on the path whose entry points are those of pyproject.toml."""
    import tomllib

    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    info = tmp_path / "memplan-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: memplan\nVersion: 0\n")
    lines = [f"{name} = {target}" for name, target in project["entry-points"]["torch_dynamo_backends"].items()]
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\n" + "\n".join(lines) + "\n")
    code = (
        "import torch\n"
        "f = torch.compile(torch.nn.Linear(4, 2), backend='memplan')\n"
        "f(torch.ones(3, 4)).sum().backward()\n"
        "assert 'memplan' in torch._dynamo.list_backends()\n"
    )
    path = os.pathsep.join([str(tmp_path), str(root), os.environ.get("PYTHONPATH", "")])
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path}, timeout=300)


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
    assert other._options.gradients == "outside"


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


def test_orders_that_alternate_come_to_rest() -> None:
    """Every second step ends with a call that waits while the next step begins, as in pytorch/examples/dcgan."""
    torch.manual_seed(0)
    eager = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)), nn.Sequential(nn.Linear(8, 16), nn.GELU())
    models = copy.deepcopy(eager)
    backend = memplan.Backend()
    compiled: list[Any] = [torch.compile(model, backend=backend) for model in models]
    waiting: list[Any] = [None, None]
    seen: list[Any] = []
    for step in range(24):
        batches = torch.randn(6, 8), torch.randn(6, 4)
        pairs: Any = (eager, compiled)
        for i, (g, d) in enumerate(pairs):
            d(batches[0]).sum().backward()
            waiting[i] = fake = g(batches[1])
            d(fake.detach()).square().sum().backward()
            d(fake).sum().backward()
            if step % 2:
                waiting[i] = g(batches[1] + 1)
            del fake
        for one, two in zip(eager, models, strict=True):
            for p, q in zip(one.parameters(), two.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)  # type: ignore[arg-type]
        placed = [id(instance.runner) for graph in backend.graphs for instance in graph.instances]
        seen.append((backend.arena_size, placed))
    assert len(backend.graphs) == 3
    assert len(seen[-1][1]) == 4, "each order makes instances of its own"
    assert seen[-1] == seen[-2] == seen[-3] == seen[-4], "programs are moved in every step"


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


def _steps(model: nn.Module, call: Any, count: int) -> list[torch.Tensor]:
    return _train(model, lambda x: call(x).square().mean(), [(torch.randn(8, 16),)] * count)


@pytest.mark.parametrize("kept", [False, True])
def test_a_tensor_that_was_replaced_is_freed_once_nobody_else_has_it(kept: bool) -> None:
    torch.manual_seed(0)
    model, backend = Masked(), Backend()
    call = torch.compile(model, backend=backend)
    _steps(model, call, 3)
    (before,) = [one for graph in backend.graphs for one in graph.instances]
    of_before = weakref.ref(before)
    del before
    before_mask = weakref.ref(model.mask)
    holder = [model.mask] if kept else []
    model.renew(3)
    _steps(model, call, 3)
    assert (before_mask() is None, of_before() is None) == (not kept, not kept)
    assert len(backend.graphs) == 2
    assert sum(len(graph.instances) for graph in backend.graphs) == 1 + kept
    assert len(holder) == kept


def test_a_model_with_a_mask_of_before_runs_again() -> None:
    """Its graph has no program any more, and makes another one."""
    torch.manual_seed(0)
    model, backend = Masked(), Backend()
    eager = copy.deepcopy(model)
    call = torch.compile(model, backend=backend)
    for rows in (0, 3, 0, 3, 0):
        for one in (model, eager):
            one.renew(rows)
        torch.manual_seed(rows)
        ours = _steps(model, call, 3)
        torch.manual_seed(rows)
        assert all(map(torch.equal, ours, _steps(eager, eager, 3)))


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
