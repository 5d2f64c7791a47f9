"""A plan's claim about all orders is held against its evidence when it is loaded."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.errors import InvalidPlan
from memplan.planning.planfile import check_consistency
from memplan.schedule import Evidence, is_proven_again, order, require_evidence
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import branching_graph, branching_plan
from tests.schedule.brute import optimum
from tests.schedule.test_bound import diamonds


@given(graphs(max_ops=8))
def test_what_a_policy_says_holds_and_a_byte_more_does_not(graph: Graph) -> None:
    """By brute force, and by its evidence, which proves that bound and no higher one."""
    least = optimum(graph)
    for policy in ("auto", "exact", "traced"):
        found = order(graph, policy)
        assert found.bound <= least <= found.max_live
        assert found.certified or policy != "exact"
        require_evidence(graph, found)
        if graph.ops and is_proven_again(found):
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
        ({"evidence": Evidence.SEARCH}, "proof"),
    ],
)
def test_a_false_certificate_is_refused(changes: dict[str, object], where: str) -> None:
    schedule = order(branching_graph())
    assert (schedule.bound, schedule.evidence, schedule.proof) == (150, Evidence.CUT, "op3")
    plan = branching_plan("auto")
    false = dataclasses.replace(plan, schedule=dataclasses.replace(schedule, **changes))  # type: ignore[arg-type]
    with pytest.raises(InvalidPlan, match=rf"schedule\.{where}"):
        check_consistency(false)


def test_a_search_is_repeated_unless_it_was_a_long_one() -> None:
    """Of two branches either may come last, and the other's result is alive then: no cut says so."""
    graph = diamonds(2)
    found = order(graph)
    assert found.evidence is Evidence.SEARCH
    require_evidence(graph, found)
    worse = dataclasses.replace(found, bound=found.bound + 1, max_live=found.max_live + 1)
    with pytest.raises(InvalidPlan, match="a search proves"):
        require_evidence(graph, worse)
    assert order(graph, "exact").evidence is Evidence.LONG_SEARCH
    require_evidence(graph, order(graph, "exact"))


def test_the_peak_can_lie_between_forward_and_backward() -> None:
    """Three results wait for the backward, whose ops work in place: whichever comes first, none needs as much in
    every order as the moment before."""
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
