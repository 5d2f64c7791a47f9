"""`device=`: the model and its caller stay on the CPU, the step runs in an arena that holds copies of everything."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memplan
from memplan.analysis.forecast import Residence
from memplan.core.evictions import OFFLOAD, OFFLOAD_WAIT
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.errors import BudgetInfeasible, InvalidEviction, MemplanError, PlanMismatch, UnsupportedDevice
from memplan.evict.apply import apply
from memplan.evict.workload import Event, Kind, Workload
from memplan.planning.fit import make_workload
from memplan.runtime.debug.hooks import Tracker
from memplan.trace import trace
from tests.models import Made
from tests.runtime.budgets import FAST_LINK
from tests.slow import slow

FLOW: dict[str, Any] = {"policy": "flow", "costs": FAST_LINK}


class SeveralResults(nn.Module):
    """Returns something that its backward reads, a view, an input and a number; has statistics, changed in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        hidden = torch.tanh(self.norm(self.one(x)))
        return hidden, self.two(hidden).t(), x, 3


@pytest.fixture
def net() -> SeveralResults:
    torch.manual_seed(0)
    return SeveralResults()


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


BY_GENOA = {"arena_budget": "min", "policy": "genoa"}
BY_FLOW = {"arena_budget": "min", "policy": "flow"}


@pytest.mark.parametrize("options", [slow({}), slow(BY_GENOA), BY_FLOW])
def test_results_gradients_and_buffers_are_those_without_a_device(
    options: dict[str, Any], net: SeveralResults, x: torch.Tensor
) -> None:
    reference = memplan.compile(copy.deepcopy(net), x.clone().requires_grad_(), gradients="outside")
    options = {"sanitize": "poison", "gradients": "outside", "costs": FAST_LINK, **options}
    compiled = memplan.compile(net, x.clone().requires_grad_(), device="cpu", **options)
    for _ in range(2):
        x = torch.randn(8, 16)
        found = []
        for module in (reference, compiled):
            leaf = x.clone().requires_grad_()
            hidden, view, same, number = module(leaf)
            assert same is leaf
            assert number == 3
            (hidden.sum() + view.square().sum()).backward()
            found.append([hidden, view, leaf.grad, *(p.grad for p in module.parameters()), *module.buffers()])
        assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
        with torch.no_grad():
            for module in (reference, compiled):
                for p in module.parameters():
                    assert p.grad is not None
                    p.sub_(0.1 * p.grad)
                    p.grad = None


def test_the_forwards_results_are_home_when_it_returns(net: SeveralResults, x: torch.Tensor) -> None:
    reference = copy.deepcopy(net)
    compiled = memplan.compile(net, x, device="cpu", **FLOW)
    for _ in range(2):  # no backward comes
        expected, found = reference(x), compiled(x)
        assert all(torch.equal(one, two) for one, two in zip(expected[:2], found[:2], strict=True))
        assert all(torch.equal(one, two) for one, two in zip(reference.buffers(), net.buffers(), strict=True))
        del found


def test_other_modes_and_moved_parameters(net: SeveralResults, x: torch.Tensor) -> None:
    compiled = memplan.compile(net, x, device="cpu", **FLOW)
    for p in net.parameters():
        p.data = torch.randn(p.shape)
    net.eval()
    with torch.no_grad():
        assert all(torch.equal(one, two) for one, two in zip(net(x)[:2], compiled(x)[:2], strict=True))


def test_copies_pickles_and_plan_files_run_there_too(net: SeveralResults, x: torch.Tensor, tmp_path: Path) -> None:
    net.eval()
    compiled = memplan.compile(net, x, train=False, device="cpu:1", **FLOW)
    assert compiled.plan.eviction is not None
    assert compiled.plan.eviction.device == "cpu:1"
    expected = compiled(x)[0]
    compiled.plan.save(tmp_path / "plan.json")
    loaded = memplan.compile(net, x, train=False, plan=tmp_path / "plan.json")
    twins: list[Any] = [pickle.loads(pickle.dumps(compiled)), loaded]
    for twin in twins:
        assert torch.equal(twin(x)[0], expected)
        assert twin.plan.eviction.device == "cpu:1"
    with pytest.raises(PlanMismatch, match="runs on cpu:1"):
        memplan.compile(net, x, train=False, plan=tmp_path / "plan.json", device="cpu")
    with pytest.raises(PlanMismatch, match="runs on the device of the model"):
        memplan.compile(net, x, train=False, plan=memplan.plan(net, x, train=False), device="cpu")


def test_everything_is_counted(net: SeveralResults, x: torch.Tensor) -> None:
    compiled = memplan.compile(net, x, device="cpu", arena_budget=0.7, **FLOW)
    plan = compiled.plan
    assert plan.eviction is not None
    assert plan.arena_size <= plan.eviction.arena_budget
    assert {s.device for s in plan.graph.storages if s.planned} == {"cpu:0"}
    assert {s.device for s in plan.graph.storages if not s.planned} == {"cpu"}
    assert plan.on_device == plan.arena_size + max(plan.transient)
    touched = {plan.graph.values[v].storage for op in plan.graph.ops if op.target.startswith("aten") for v in op.reads}
    assert all(plan.graph.storages[s].planned for s in touched)
    tracker = Tracker()
    with compiled.hooks.add(tracker):
        compiled(x)[0].sum().backward()
    assert tracker.peak == plan.max_live
    weight = plan.forecast("primals_1")
    assert {Residence.HOST, Residence.ARENA} <= {place.where for place in weight.places}
    report = plan.report()
    assert report.kept is not None
    assert report.kept.device == "cpu:0"


@pytest.mark.parametrize("device", ["nowhere", "xpu", 17, "cuda:99", "cpu:x"])
def test_a_device_that_is_not_there(device: Any, net: SeveralResults, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedDevice, match="device"):
        memplan.compile(net, x, device=device)
    with pytest.raises(UnsupportedDevice, match="device"):
        memplan.plan(net, x, device=device)


def test_what_does_not_go_together(net: SeveralResults, x: torch.Tensor) -> None:
    with pytest.raises(MemplanError, match="recorded step"):
        memplan.compile(net, x, device="cpu", cuda_graph=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, fused=True)
    with pytest.raises(MemplanError, match="recorded step"):
        memplan.compile_step(net, optimizer, lambda out: out[0].sum(), x, device="cpu", cuda_graph=True)
    with pytest.raises(BudgetInfeasible):
        memplan.compile(net, x, device="cpu", arena_budget=64, **FLOW)


@pytest.mark.parametrize(("kernels", "budget"), [("aten", "min"), ("aten", 0.5), slow("inductor", "min")])
def test_graphs_of_torch_compile_run_on_a_device(kernels: Any, budget: Any) -> None:
    """Two graphs, with a number between them; the budget holds for both together."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(2))
    model, x = (
        Made(lambda m, x: m.layers[1](y if (y := m.layers[0](x)).sum().item() else x), layers=layers),
        torch.randn(64, 32),
    )

    def steps(**options: Any) -> tuple[list[torch.Tensor], int, list[Plan]]:
        torch._dynamo.reset()
        backend, found = memplan.Backend(kernels=kernels, **options), []
        compiled = torch.compile(model, backend=backend)
        for _ in range(3):
            model.zero_grad()
            loss = compiled(x).square().mean()
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found, backend.arena_size, [plan for graph in backend.graphs for plan in graph.plans]

    (expected, whole, _), (found, arena, plans) = steps(device="cpu"), steps(device="cpu", budget=budget)
    assert all(map(torch.equal, steps()[0], expected))
    assert len(found) == len(expected) == 27
    assert all(map(torch.equal, found, expected))
    assert [plan.eviction and plan.eviction.device for plan in plans] == ["cpu:0", "cpu:0"]
    assert arena < whole


def test_a_step_that_fits_neither_device_nor_host_is_refused_with_both_numbers(
    net: SeveralResults, x: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = memplan.compile(net, x, device="cpu", budget="min").plan
    beside = ("parameters", "constants", "inputs", "tangents", "outputs", "gradients")
    assert plan.on_host == plan.host_size + sum(plan.outside[part] for part in beside)
    assert f"{format_bytes(plan.on_host)} of its memory" in " ".join(str(plan.report()).split())
    monkeypatch.setattr("memplan.runtime.builder.host_memory", lambda: plan.on_host - 1)
    with pytest.raises(BudgetInfeasible, match=r"of the host's memory beside .* on the device") as refused:
        memplan.compile(net, x, device="cpu", budget="min")
    assert refused.value.smallest == plan.on_host
    monkeypatch.setattr("memplan.runtime.builder.host_memory", lambda: plan.on_host)
    assert memplan.compile(net, x, device="cpu", budget="min").plan.on_host == plan.on_host


@pytest.mark.parametrize("options", [{"policy": "genoa"}, {"budget": "1MiB"}, slow({})])
def test_calls_ahead_generation_and_state_in_between_are_those_without_a_device(options: dict[str, Any]) -> None:
    """Three forwards wait for backwards in other orders; growing inputs have none; states are read and loaded."""

    def run(**how: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = [nn.Linear(32, 32), nn.Tanh(), nn.LayerNorm(32)] * 2
        compiled = memplan.compile(nn.Sequential(*layers), torch.randn(8, 32), gradients="outside", **how)
        generator, found = torch.Generator().manual_seed(1), list[torch.Tensor]()
        for order in ((0, 1, 2), (2, 0, 1), (1, 2, 0)):
            batches = [torch.randn(8, 32, generator=generator) for _ in range(3)]
            results = [compiled(batch) for batch in batches]
            state = {name: t.clone() for name, t in compiled.state_dict().items()}
            for i in order:
                results[i].square().mean().backward()
                found += [results[i].detach().clone(), *state.values()]
            tokens = batches[0][:1]
            with torch.no_grad():
                for _ in range(3):
                    tokens = torch.cat([tokens, compiled(tokens)[-1:]])
                found.append(tokens)
                for name, p in compiled.named_parameters():
                    assert p.grad is not None
                    found.append(p.grad.clone())
                    state[name] -= p.grad
                    p.grad = None
            compiled.load_state_dict(state)
        return found

    expected, found = run(), run(device="cpu", costs=FAST_LINK, **options)
    assert len(found) == len(expected)
    assert all(map(torch.equal, expected, found))


def test_calls_ahead_of_which_a_budget_holds_one_are_refused(net: SeveralResults, x: torch.Tensor) -> None:
    compiled = memplan.compile(net, x, device="cpu", budget="min")
    first = compiled(x)
    with pytest.raises(BudgetInfeasible, match="a second call in flight"):
        compiled(x)
    first[0].sum().backward()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_model_that_is_on_a_device_already(net: SeveralResults, x: torch.Tensor) -> None:
    with pytest.raises(UnsupportedDevice, match="already"):
        memplan.compile(net.cuda(), x.cuda(), device="cuda")


# -- the rules of a forward that returns -------------------------------------------------------------------


def _workload(net: SeveralResults, x: torch.Tensor) -> tuple[Graph, Workload]:
    traced = trace(net, x, device="cpu")
    order = tuple(range(len(traced.graph.ops)))
    workload = make_workload(traced.graph, order, FAST_LINK, 64, device="cpu:0")
    return traced.graph, workload


def test_what_the_forward_changes_is_due_before_the_backward(net: SeveralResults, x: torch.Tensor) -> None:
    graph, workload = _workload(net, x)
    found = apply(workload, workload.plain).graph
    for target in (OFFLOAD, OFFLOAD_WAIT):
        early = {
            found.values[op.writes[0]].storage for op in found.ops if op.target == target and op.phase is Phase.FORWARD
        }
        assert workload.due <= early
    kinds = {graph.storages[s].kind for s in workload.due}
    assert kinds == {StorageKind.OUTPUT, StorageKind.PARAMETER}


def test_events_that_forget_it_or_come_before_it_are_refused(net: SeveralResults, x: torch.Tensor) -> None:
    _, workload = _workload(net, x)
    due, late = min(workload.due), min(workload.late)
    goes_home = Event(Kind.OFFLOAD, due), Event(Kind.OFFLOADED, due)
    with pytest.raises(InvalidEviction, match=r"not back on the host|when the backward begins"):
        apply(workload, tuple(e for e in workload.plain if e not in goes_home))
    arrival = Event(Kind.RELOAD, late), Event(Kind.RELOADED, late)
    with pytest.raises(InvalidEviction, match="given when the backward begins"):
        apply(workload, (*arrival, *(e for e in workload.plain if e not in arrival)))
