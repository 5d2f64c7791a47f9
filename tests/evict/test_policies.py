"""Properties of every eviction policy, over random graphs and models of the zoo."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks import zoo
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.errors import BudgetInfeasible, MemplanError
from memplan.evict.measure import measure
from memplan.evict.policies import POLICIES, fit_policy
from memplan.evict.policies.auto import auto, recompute
from memplan.evict.policies.dtr import Heuristic, dtr, h_ahead, h_dtr, on_demand
from memplan.evict.policies.flow import flow, genoa
from memplan.evict.simulator import ByteCounter, EvictionKind, SimulatedDevice
from memplan.evict.workload import Events, Kind, Policy, Workload, floor
from memplan.trace import capture_loss, trace
from tests.evict.judge import judged, workload_of
from tests.graph_strategies import GraphBuilder, graphs

_SLOW = {"auto", "recompute"}
_SHARES = (1.0, 0.8, 0.6, 0.5, 0.4, 0.0)  # of what the step needs without eviction; 0.0: the floor
_FEW = settings(max_examples=15)


@cache
def _model(name: str) -> Graph:
    """A model of the zoo; "mlp step": with AdamW's update in the graph."""
    model, inputs = getattr(zoo, name.removesuffix(" step"))("nano")
    if not name.endswith("step"):
        return trace(model, inputs).graph
    loss = capture_loss(model, torch.optim.AdamW(model.parameters(), fused=True), inputs)
    return loss.step(clip_grad_norm=None).retrace().graph


def _at(workload: Workload, share: float) -> Workload:
    plain = measure(workload, workload.plain).peak
    least = floor(workload)[0]
    return replace(workload, budget=max(int(plain * share), least) if share else least)


def _fitted(graph: Graph, workload: Workload, policy: Policy) -> Events | None:
    """Events that were judged, within the budget, and the same when asked for again; None when the policy gives up."""
    try:
        events = policy(workload)
    except BudgetInfeasible:
        return None
    assert policy(workload) == events
    _, figures = judged(graph, workload, events)
    assert figures.peak <= workload.budget
    return events


@given(st.data(), st.sampled_from(sorted(POLICIES.keys() - _SLOW)))
def test_within_the_budget_and_equal_to_the_traced_step(data: st.DataObject, name: str) -> None:
    graph = data.draw(graphs(max_ops=12))
    workload = workload_of(graph, alignment=data.draw(st.sampled_from([1, 64])), host_resident=data.draw(st.booleans()))
    _fitted(graph, _at(workload, data.draw(st.sampled_from(_SHARES))), fit_policy(name))


@_FEW
@given(graphs(max_ops=8), st.sampled_from(sorted(_SLOW)), st.sampled_from(_SHARES), st.sampled_from([1, 64]))
def test_searching_policies_too(graph: Graph, name: str, share: float, alignment: int) -> None:
    workload = workload_of(graph, alignment=alignment)
    _fitted(graph, _at(workload, share), auto if name == "auto" else recompute)


@pytest.mark.parametrize("host_resident", [False, True])
@pytest.mark.parametrize("name", sorted(POLICIES.keys() - _SLOW))
@pytest.mark.parametrize("model", ["mlp", "mlp step", "gpt2", "resnet"])
def test_models_of_the_zoo(model: str, name: str, host_resident: bool) -> None:
    graph = _model(model)
    workload = workload_of(graph, alignment=64, host_resident=host_resident)
    plain = measure(workload, workload.plain)
    whole = _at(workload, 1.0)
    kept = _fitted(graph, whole, fit_policy(name))
    # genoa moves everything; capuchin counts streamed storages throughout
    if kept is not None and name not in ({"capuchin"} if host_resident else set()) | {"genoa"}:
        assert measure(whole, kept).seconds <= plain.seconds * (1 + 1e-9)
    for share in _SHARES[1:]:
        _fitted(graph, _at(workload, share), fit_policy(name))


@given(graphs(max_ops=12), st.booleans(), st.sampled_from([1, 64]))
def test_genoa_needs_the_floor(graph: Graph, host_resident: bool, alignment: int) -> None:
    workload = workload_of(graph, alignment=alignment, host_resident=host_resident)
    least, op = floor(workload)
    workload = replace(workload, budget=least)
    assert judged(graph, workload, genoa(workload))[1].peak == least
    if least:
        with pytest.raises(BudgetInfeasible, match=graph.ops[workload.sources[op]].name) as raised:
            genoa(replace(workload, budget=least - 1))
        assert raised.value.smallest == least


@given(graphs(max_ops=12), st.booleans(), st.floats(0, 1))
def test_flow_is_never_slower_than_genoa_and_needs_no_more(graph: Graph, host_resident: bool, share: float) -> None:
    workload = _at(workload_of(graph, host_resident=host_resident), share)
    assert _fitted(graph, workload, flow) is not None
    assert measure(workload, flow(workload)).seconds <= measure(workload, genoa(workload)).seconds


@given(graphs(max_ops=12), st.sampled_from([h_dtr, h_ahead, lambda c: c.storage]))
def test_dtr_takes_any_heuristic(graph: Graph, heuristic: Heuristic) -> None:
    workload = _at(workload_of(graph), 0.6)
    _fitted(graph, workload, lambda w: dtr(w, heuristic=heuristic))


@_FEW
@given(graphs(max_ops=12), st.booleans(), st.sampled_from(_SHARES))
def test_eviction_on_demand_keeps_the_budget_and_the_bits(graph: Graph, host_resident: bool, share: float) -> None:
    workload = _at(workload_of(graph, host_resident=host_resident), share)
    for events in on_demand(workload):
        assert judged(graph, workload, events)[1].peak <= workload.budget


class _Anyhow:
    """An evictor that chooses by chance."""

    swaps = True

    def __init__(self, seed: int) -> None:
        self._chance = Random(seed)

    def choose(self, device: SimulatedDevice, candidates: Sequence[int]) -> int:
        return self._chance.choice(candidates)

    def choose_kind(self, device: SimulatedDevice, storage: int) -> EvictionKind:
        return self._chance.choice(list(EvictionKind))

    def changed(self, device: SimulatedDevice, storage: int) -> None:
        pass


def _twins() -> Graph:
    """Pairs of results of one op each, which many later ops read one by one."""
    b, kind = GraphBuilder(), StorageKind.ACTIVATION
    last = b.storage(StorageKind.PARAMETER, 8, planned=False)
    made = list[int]()
    for _ in range(2):
        pair = b.storage(kind, 8, planned=True), b.storage(kind, 8, planned=True)
        b.op(Phase.FORWARD, (last,), pair)
        made += pair
    for i in range(16):
        result = b.storage(kind, 8, planned=True)
        b.op(Phase.FORWARD, (last, made[i % 3]), (result,))
        last = result
    return b.graph()


@given(graph=st.just(_twins()) | graphs(), seed=st.integers(0, 1 << 30), share=st.sampled_from(_SHARES))
def test_whatever_is_evicted_the_events_are_possible(graph: Graph, seed: int, share: float) -> None:
    """A result that is written again with another one, and has a copy on the host, does not stay on the device."""
    workload = _at(workload_of(graph), share)
    with suppress(BudgetInfeasible):
        events = SimulatedDevice(workload, ByteCounter(workload.budget), _Anyhow(seed)).simulate()
        judged(graph, workload, events)


def test_the_storage_that_is_used_last_is_dropped_first() -> None:
    """Results of one size and cost, used in the order they are made: DTR drops the oldest, which is used first."""
    b = GraphBuilder()
    _, *made = (b.storage(StorageKind.ACTIVATION, 64, planned=i > 0) for i in range(6))
    for one in made[:4]:
        b.op(Phase.BACKWARD, (), (one,))
    for one in made[:4]:
        b.op(Phase.BACKWARD, (one,), (b.storage(StorageKind.ACTIVATION, 64, planned=True),))
    graph = b.graph()
    workload = replace(workload_of(graph), budget=192)
    ahead = next(on_demand(workload))
    assert measure(workload, ahead).seconds < measure(workload, dtr(workload)).seconds
    assert next(index for kind, index in ahead if kind is Kind.DROP) == graph.values[made[2]].storage


def test_what_is_dropped_for_its_own_maker_is_made_by_that() -> None:
    """An op of two results runs again for one of them; the room that it takes is the other's."""
    b = GraphBuilder()
    _, one, two, three, four, five, six = (b.storage(StorageKind.ACTIVATION, 64, planned=i > 0) for i in range(7))
    b.op(Phase.BACKWARD, (), (one, two))
    b.op(Phase.BACKWARD, (), (three, four))
    b.op(Phase.BACKWARD, (), (five,))
    b.op(Phase.BACKWARD, (), (six,))
    b.op(Phase.BACKWARD, (three,), (b.view(1, 0),))
    b.op(Phase.BACKWARD, (one, four), (b.storage(StorageKind.ACTIVATION, 64, planned=True),))
    graph = b.graph()
    events = _fitted(graph, replace(workload_of(graph), budget=192), dtr)
    assert events is not None
    assert sum(event == (Kind.RUN, 1) for event in events) == 2


def test_a_function_is_a_policy() -> None:
    def keep(workload: Workload) -> Events:
        return workload.plain

    assert fit_policy(keep) is keep


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(MemplanError, match="'auto', 'recompute'"):
        fit_policy("best")
