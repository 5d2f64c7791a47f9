"""A plan's claim about all orders is held against its evidence when it is loaded."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.core.schedule import Evidence, working_set_bound
from memplan.errors import InvalidPlan
from memplan.planning.planfile import check_consistency, load
from memplan.schedule import order, require_evidence
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import branching_graph, branching_plan
from tests.schedule.brute import optimum


@given(graphs(max_ops=8))
def test_what_a_policy_says_holds_and_a_byte_more_does_not(graph: Graph) -> None:
    """By brute force, and by its evidence, which proves that bound and no higher one."""
    least = optimum(graph)
    for policy in ("auto", "traced"):
        found = order(graph, policy)
        assert working_set_bound(graph) <= found.bound <= least <= found.max_live
        require_evidence(graph, found)
        if graph.ops:
            with pytest.raises(InvalidPlan, match=r"schedule\.bound"):
                require_evidence(graph, dataclasses.replace(found, bound=found.bound + 1))


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"bound": 149}, "bound"),
        ({"proof": "op0"}, "bound"),
        ({"proof": "op9"}, "proof"),
        ({"proof": ""}, "proof"),
        ({"evidence": Evidence.WORKING_SET}, "bound"),
    ],
)
def test_a_false_certificate_is_refused(changes: dict[str, object], where: str) -> None:
    schedule = order(branching_graph())
    assert (schedule.bound, schedule.evidence, schedule.proof) == (150, Evidence.CUT, "op3")
    plan = branching_plan("auto")
    false = dataclasses.replace(plan, schedule=dataclasses.replace(schedule, **changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match=rf"schedule\.{where}"):
        check_consistency(false)


def test_the_certificate_is_saved_and_loaded(tmp_path: Path) -> None:
    for policy in ("auto", "traced"):
        plan = branching_plan(policy)
        plan.save(tmp_path / "plan.json")
        assert load(tmp_path / "plan.json").schedule == plan.schedule


def test_the_peak_can_lie_between_forward_and_backward() -> None:
    """Three results wait for the backward, whose ops work in place, so that none needs as much as the moment before."""
    b = GraphBuilder()
    one, two, three, *results = (b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(5))
    for value in (one, two, three):
        b.op(Phase.FORWARD, (), (value,))
    b.op(Phase.BACKWARD, (one,), (results[0],), target="aten.tanh.default")
    b.op(Phase.BACKWARD, (two, three), (results[1],), target="aten.add.Tensor")
    graph = with_inplace_candidates(b.graph())
    found = order(graph)
    assert (found.evidence, found.proof, found.bound, found.max_live) == (Evidence.BETWEEN, "", 192, 192)
    require_evidence(graph, found)
    for changes in ({"bound": 191}, {"proof": "op3"}):
        with pytest.raises(InvalidPlan, match="bound"):
            require_evidence(graph, dataclasses.replace(found, **changes))
