"""torch.TensorRef: its policies Genoa and Flow (rows T2 and T3)."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from memplan.core.graph import Graph
from memplan.evict.measure import measure
from memplan.evict.policies.flow import flow
from memplan.evict.policies.genoa import genoa
from memplan.evict.workload import Kind, Workload, floor
from tests.evict.judge import judged, workload_of
from tests.models import traced_nano


@cache
def _model(name: str, *, host_resident: bool) -> tuple[Graph, Workload]:
    graph = traced_nano(name).graph
    return graph, workload_of(graph, alignment=64, host_resident=host_resident)


@pytest.mark.parametrize("host_resident", [False, True])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_T2_genoa_needs_one_ops_working_set(name: str, host_resident: bool) -> None:  # noqa: N802
    graph, workload = _model(name, host_resident=host_resident)
    least, op = floor(workload)
    workload = replace(workload, budget=least)
    _, figures = judged(graph, workload, genoa(workload))
    assert figures.peak == least
    touched = {*workload.reads[op], *workload.writes[op]}
    assert least <= sum(workload.size[s] for s in touched)  # less where a result takes an input's place
    assert least < measure(workload, workload.plain).peak


def test_T2_an_operand_arrives_right_before_its_op_and_leaves_right_after() -> None:  # noqa: N802
    _, workload = _model("gpt2", host_resident=True)
    workload = replace(workload, budget=floor(workload)[0])
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


@pytest.mark.parametrize("host_resident", [False, True])
@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_T3_flow_is_faster_the_more_bytes_there_are_and_faster_than_genoa(name: str, host_resident: bool) -> None:  # noqa: N802
    graph, workload = _model(name, host_resident=host_resident)
    plain, least = measure(workload, workload.plain).peak, floor(workload)[0]
    slowest = measure(workload, genoa(replace(workload, budget=least))).seconds
    for share in (1.0, 0.8, 0.6, 0.4, 0.0):
        fitted = replace(workload, budget=max(int(plain * share), least))
        events = flow(fitted)
        figures = judged(graph, fitted, events)[1]
        assert figures.peak <= fitted.budget
        assert figures.seconds < slowest
        runs = [event.of for event in events if event.kind is Kind.RUN]
        assert runs == sorted(set(runs))  # nothing is computed twice
    if not host_resident:
        whole = replace(workload, budget=plain)
        assert flow(whole) == workload.plain
