"""torch.TensorRef: a model apart from the device on which it runs (row T1), with Genoa's and Flow's plans (T2, T3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

import memplan
from benchmarks.zoo import ZOO
from memplan.devices.kinds import alignment_of
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow, genoa
from memplan.evict.workload import Kind, Workload, floor
from memplan.planning.fit import make_workload
from memplan.schedule import order
from memplan.trace import trace
from tests.runtime.budgets import FAST_LINK
from tests.slow import slow

_ON_DEVICE = [
    pytest.param("cpu", id="cpu"),
    pytest.param(
        "cuda", id="cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
    ),
]
GRAPHS = ("mlp", "vit", "resnet")


def _parameters(model: nn.Module) -> int:
    return sum(p.nbytes for p in model.parameters())


def _close(one: torch.Tensor, two: torch.Tensor, device: str) -> None:
    """The same bits where the kernels are the same; another device's kernels round otherwise."""
    if device == "cpu":
        assert torch.equal(one, two)
    else:
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("device", _ON_DEVICE)
@pytest.mark.parametrize(
    ("name", "kernels"),
    [("mlp", "aten"), ("vit", "aten"), ("mlp", "inductor"), *(slow(n, "inductor") for n in ("gpt2", "llama", "vit"))],
)
def test_T1_parameters_larger_than_the_budget_run_forward_and_backward(  # noqa: N802
    name: str, kernels: Any, device: str
) -> None:
    """The zoo's ViT is that of transformers: it is not changed, and does not move."""
    model, inputs = ZOO[name]("nano")
    reference = memplan.compile(copy.deepcopy(model), inputs, kernels=kernels)
    how: dict[str, Any] = {"device": device, "kernels": kernels, "costs": FAST_LINK}
    smallest = memplan.plan(model, inputs, policy="genoa", **how)
    budget = max(smallest.arena_size, _parameters(model) // 2)
    assert budget < _parameters(model)
    compiled = memplan.compile(model, inputs, arena_budget=budget, policy="flow", **how)
    assert compiled.plan.arena_size <= budget
    assert compiled.plan.graph.is_generated == (kernels == "inductor")
    for seed in range(2):
        losses = []
        for module in (reference, compiled):
            torch.manual_seed(seed)
            loss = module(*inputs)
            loss.backward()
            losses.append(loss.detach())
        _close(losses[1], losses[0], device)
        for (key, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert p.device.type == "cpu", key
            assert (p.grad is None) == (q.grad is None), key
            if p.grad is not None and q.grad is not None:
                assert p.grad.device.type == "cpu"
                _close(p.grad, q.grad, device)
    with torch.no_grad():
        results: list[Any] = [(torch.manual_seed(0), module(*inputs)) for module in (reference, compiled)]
    _close(results[1][1], results[0][1], device)


@pytest.mark.parametrize("device", _ON_DEVICE)
@pytest.mark.parametrize("budget", [None, "min"])
def test_T1_three_steps_of_training_equal_eagers(budget: str | None, device: str) -> None:  # noqa: N802
    model, inputs = ZOO["mlp"]("nano")
    model.eval()  # another device draws other dropout masks
    eager = copy.deepcopy(model)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, eager))
    options: dict[str, Any] = {"device": device, "arena_budget": budget, "policy": "flow", "costs": FAST_LINK}
    step = memplan.compile_step(model, ours, lambda loss: loss, inputs, **options)
    if budget is not None:
        assert step.plan.arena_size < _parameters(model) * 3  # parameters and two tensors of state for each
    for _ in range(3):
        loss = step(*inputs)
        theirs.zero_grad()
        expected = eager(*inputs)
        expected.backward()
        theirs.step()
        _close(loss, expected.detach(), device)
        for key, p in eager.state_dict().items():
            assert model.state_dict()[key].device.type == "cpu"
            _close(model.state_dict()[key], p, device)
        for p, q in zip(model.parameters(), eager.parameters(), strict=True):
            for key, value in theirs.state[q].items():
                assert ours.state[p][key].device.type == "cpu"
                _close(ours.state[p][key], value, device)


def _trained(how: dict[str, Any], *, scaled: bool = False, **place: Any) -> list[torch.Tensor]:
    """Return what a loop shows after each batch: with a schedule, evaluations, and states saved and loaded."""
    model, inputs = ZOO["mlp"]("nano")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    if scaled:
        loss_of = memplan.compile(model, inputs, **place)
    else:
        step = memplan.compile_step(model, optimizer, lambda loss: loss, inputs, **how, **place)
    predict = memplan.compile(model, inputs, train=False, **place)
    saved: Any = None
    found: list[torch.Tensor] = []
    for i in range(4):
        torch.manual_seed(i)
        loss = loss_of(*inputs) if scaled else step(*inputs)
        if scaled:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        if (i + 1) % how.get("accumulate", 1) == 0:
            schedule.step()
        model.eval()
        with torch.no_grad():
            found += [loss.detach().clone(), predict(*inputs).clone()]
        model.train()
        states = model.state_dict(), optimizer.state_dict()
        found += [t.clone() for t in tree_leaves(states) if isinstance(t, torch.Tensor)]
        if i == 1:
            saved = copy.deepcopy(states)
        if i == 2:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return found


@pytest.mark.parametrize(
    "how",
    [{"clip_grad_norm": 0.1}, {"accumulate": 2}, {"kernels": "inductor", "accumulate": 2, "clip_grad_norm": 0.1}, None],
    ids=["clipped", "accumulated", "generated", "scaled"],
)
def test_T1_a_training_loop_is_what_it_is_where_the_model_is(how: dict[str, Any] | None) -> None:  # noqa: N802
    asked: dict[str, Any] = {"how": how or {}, "scaled": how is None}
    expected, found = _trained(**asked), _trained(**asked, device="cpu", budget="min")
    assert len(found) > 4 * 10
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def _workload(name: str) -> Workload:
    traced = trace(*ZOO[name]("nano"), device="cpu")
    return make_workload(
        traced.graph, order(traced.graph).order, FAST_LINK, alignment_of(traced.device), device="cpu:0"
    )


@pytest.mark.parametrize("name", ["mlp", slow("vit"), "resnet"])
def test_T2_genoas_device_memory_is_the_working_set_of_one_op(name: str) -> None:  # noqa: N802
    model, inputs = ZOO[name]("nano")
    plan = memplan.plan(model, inputs, device="cpu", policy="genoa", costs=FAST_LINK)
    assert plan.arena_size == plan.max_live == floor(_workload(name))[0]


def test_T2_an_operand_arrives_right_before_its_op_and_leaves_right_after() -> None:  # noqa: N802
    workload = _workload("vit")
    workload = workload.within(floor(workload)[0])
    here: set[int] = set()
    for kind, index in genoa(workload):
        if kind is Kind.RUN:
            assert here <= {*workload.reads[index], *workload.writes[index]}
            here |= {*workload.writes[index]}
            here = {s for s in here if workload.uses[s][-1] > index or s in workload.host_resident}
        elif kind is Kind.RELOAD:
            here.add(index)
        elif kind in (Kind.DROP, Kind.OFFLOADED):
            here.discard(index)
    assert not here


@pytest.mark.parametrize("link", ["fast", "slow"])
@pytest.mark.parametrize("name", GRAPHS)
def test_T3_flow_takes_no_longer_than_genoa_at_any_budget(name: str, link: str) -> None:  # noqa: N802
    workload = _workload(name)
    if link == "slow":
        costs = memplan.CostModel(**{**vars(FAST_LINK), "to_device": _SLOW, "to_host": _SLOW})
        workload = make_workload(workload.graph, tuple(range(len(workload.graph.ops))), costs, 64, device="cpu:0")
    least, most = floor(workload)[0], measure(workload, workload.plain).peak
    slowest = measure(workload, genoa(workload.within(least))).seconds
    for budget in (least + (most - least) * share // 8 for share in range(9)):
        at = workload.within(budget)
        events = flow(at)
        figures = measure(at, events)
        assert figures.peak <= budget
        assert figures.seconds < slowest or (budget == least and figures.seconds == slowest)
        runs = [event.of for event in events if event.kind is Kind.RUN]
        assert runs == sorted(set(runs)), "nothing is computed twice"


_SLOW = type(FAST_LINK.to_host)(bytes_per_second=1e8, latency=1e-5)
