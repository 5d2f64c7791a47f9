"""Torch's own points: what its partitioner makes of small models, held against our rules."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest

from benchmarks import zoo
from benchmarks.torch_budget import TorchPartition, events_of, partitions, points_of
from memplan.errors import InvalidEviction
from memplan.evict.apply import apply
from memplan.evict.costs import DEVICES
from memplan.evict.measure import measure
from memplan.evict.workload import Kind
from memplan.trace.capture.joint_graph import capture
from tests.evict.judge import judged

pytestmark = pytest.mark.slow
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
