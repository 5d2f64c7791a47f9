"""torch.TensorRef: a model apart from the device on which it runs (row T1), with Genoa's and Flow's plans (T2, T3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

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
@pytest.mark.parametrize("name", ["mlp", "vit"])
def test_T1_parameters_larger_than_the_budget_run_forward_and_backward(name: str, device: str) -> None:  # noqa: N802
    """The zoo's ViT is that of transformers: it is not changed, and does not move."""
    model, inputs = ZOO[name]("nano")
    reference = memplan.compile(copy.deepcopy(model), inputs)
    smallest = memplan.plan(model, inputs, device=device, policy="genoa", costs=FAST_LINK)
    budget = max(smallest.arena_size, _parameters(model) // 2)
    assert budget < _parameters(model)
    compiled = memplan.compile(model, inputs, device=device, arena_budget=budget, policy="flow", costs=FAST_LINK)
    assert compiled.plan.arena_size <= budget
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
    checkpoint: dict[str, Any] = {}
    for i in range(3):
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
        if i == 0:
            checkpoint = copy.deepcopy({"model": model.state_dict(), "optimizer": ours.state_dict()})
        if i == 1:  # back to the first step's end, and once more
            model.load_state_dict(checkpoint["model"])
            ours.load_state_dict(checkpoint["optimizer"])
            step(*inputs)


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
