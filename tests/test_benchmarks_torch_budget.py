"""Torch's own points: what its partitioner makes of small models, held against our rules."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch
from torch import nn

from benchmarks import zoo
from benchmarks.torch_budget import TorchPartition, events_of, partitions, points_of, torch_points
from memplan.errors import InvalidEviction
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.measure import measure
from memplan.evict.workload import Kind
from memplan.trace import trace
from memplan.trace.capture.joint_graph import capture
from tests.evict.judge import judged

_COSTS, _ALIGNMENT = DEVICES["a100"], 64
_ASKED = (0.0, 0.1, 0.5, 1.0)


@cache
def _partitions(name: str) -> tuple[TorchPartition, ...]:
    model, inputs = getattr(zoo, name)("nano")
    model.eval() if name != "resnet" else model.train()
    return partitions(capture(model, inputs, {}, train=True), _ASKED)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
@pytest.mark.parametrize("in_place", [False, True])
def test_what_torch_does_computes_the_same(name: str, in_place: bool) -> None:
    accepted = 0
    for _, workload, events in events_of(_partitions(name), _COSTS, _ALIGNMENT, in_place=in_place):
        runs = Counter(i for kind, i in events if kind is Kind.RUN)
        again = [workload.graph.ops[i] for i, count in runs.items() if count > 1]
        owned = (s for op in again for s in workload.graph.written(op) if not workload.graph.storages[s].planned)
        if any(op.random for op in again) or list(owned):
            # Its compiler would save the state of the generator; no kernel does. And torch 2.11 makes the loss again,
            # for what else its kernel returns: not where the caller has it.
            with pytest.raises(InvalidEviction):
                apply(workload, events)
        else:
            judged(workload.graph, workload, events)
            accepted += 1
    assert accepted >= 2


@pytest.mark.parametrize("name", ["mlp", "gpt2", "resnet"])
def test_points_are_of_the_events(name: str) -> None:
    found = _partitions(name)
    points = points_of(found, _COSTS, _ALIGNMENT)
    assert [p.asked for p in points] == list(_ASKED)
    for point, (_, workload, events) in zip(points, events_of(found, _COSTS, _ALIGNMENT), strict=True):
        runs = [i for kind, i in events if kind is Kind.RUN]
        assert set(runs) == set(range(len(workload.graph.ops)))
        assert point.peak == measure(workload, events).peak
        assert point.seconds == pytest.approx(sum(workload.seconds[i] for i in runs))
        assert point.overhead == pytest.approx(point.seconds / sum(workload.seconds) - 1)


def test_less_asked_is_more_computed_again() -> None:
    everything, *_, least = points_of(_partitions("gpt2"), _COSTS, _ALIGNMENT)
    assert everything.asked == 0.0
    assert everything.seconds > least.seconds
    kept = points_of(_partitions("resnet"), _COSTS, _ALIGNMENT)[-1]
    assert kept.overhead == pytest.approx(
        0.0, abs=1e-9
    )  # no chain of its ops is worth fusing: 1.0 keeps all that the backward needs


def test_in_place_needs_no_more() -> None:
    found = _partitions("gpt2")
    plain, reused = (points_of(found, _COSTS, _ALIGNMENT, in_place=flag) for flag in (False, True))
    assert all(one.peak >= two.peak and one.seconds == two.seconds for one, two in zip(plain, reused, strict=True))


def test_the_captured_graph_and_torch_s_settings_are_left_as_they_are() -> None:
    from torch._functorch import config

    model, inputs = zoo.mlp("nano")
    captured = capture(model, inputs, {}, train=True)
    before = str(captured.graph_module.graph)
    points_of(partitions(captured, (0.3,)), _COSTS, _ALIGNMENT)
    assert str(captured.graph_module.graph) == before
    assert config.activation_memory_budget == 1.0


def test_the_whole_way_from_a_model() -> None:
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())))
    inputs = (torch.zeros(256, 32),)
    first, last = torch_points(model, inputs, None, _COSTS, _ALIGNMENT, budgets=(0.0, 1.0))
    step = sum(_COSTS.seconds(trace(model, inputs, train=True).graph))
    assert last.seconds == pytest.approx(step, rel=0.2)  # without our lowering, the ops are nearly the same
    assert first.overhead > 0.1
    assert first.peak > 0
