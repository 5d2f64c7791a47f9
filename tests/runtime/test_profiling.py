"""Measured costs: every op and both directions, with nothing of the user's changed."""

from __future__ import annotations

import copy

import pytest
import torch

import memplan
from benchmarks import zoo
from memplan.errors import InputMismatch, InvalidCosts
from memplan.evict.costs import signature_of
from memplan.trace import trace


def test_P1_every_op_is_timed() -> None:  # noqa: N802
    model, inputs = zoo.mlp("nano")
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    costs = memplan.profile(model, inputs, rounds=2)
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    graph = trace(model, inputs).graph
    ours = [
        op
        for op in graph.ops
        if all(graph.storages[s].planned or s not in graph.written(op) for s in graph.touched(op))
    ]
    assert len(ours) > 10
    assert {signature_of(graph, op) for op in ours} <= set(costs.measured)
    assert all(seconds > 0 for seconds in costs.measured.values())
    assert costs.to_host.bytes_per_second > 1e6
    assert costs.to_device.latency < 1


def test_measured_costs_go_where_costs_go() -> None:
    model, inputs = zoo.mlp("nano")
    costs = memplan.profile(model, inputs, rounds=1)
    plan = memplan.plan(model, inputs, arena_budget="min", gradients="outside", costs=costs)
    assert plan.eviction is not None
    assert plan.eviction.costs == costs.name
    assert plan.eviction.seconds >= plan.eviction.base_seconds > 0


def test_bad_input() -> None:
    model, inputs = zoo.mlp("nano")
    with pytest.raises(InvalidCosts, match="rounds"):
        memplan.profile(model, inputs, rounds=0)
    with pytest.raises(InputMismatch, match="has no data"):
        memplan.profile(model.to("meta"), inputs)
