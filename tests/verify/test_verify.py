"""`memplan check --verify`: what a plan says is proven again, refuted, or stays a claim; cuts by networkx."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import time
from typing import Any

import pytest
from hypothesis import given

from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.core.plan import Plan
from memplan.errors import BudgetInfeasible, InvalidPlan, InvalidSize, MemplanError, UnsupportedGraph
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency
from memplan.schedule import Evidence, cut_bound, order
from memplan.verify import Proof, ProofState, proofs, verify
from memplan.verify.cut import between_phases, least_at
from memplan.verify.proofs import within
from tests.core.test_happens_before import offloaded
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import branching_plan, sample_plan
from tests.schedule import brute
from tests.schedule.test_bound import diamonds, ladder
from tests.schedule.test_evidence import false_layout, false_order


def _said(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, **changes))


def _searched_plan(policy: str = "auto") -> Plan:
    graph = diamonds(2)
    return make_plan(ScheduledGraph(model="", graph=graph, schedule=order(graph, policy), alignment=1, versions={}))


def _of_order(plan: Plan, time_limit: float | None = None) -> Proof:
    found = {proof.of: proof for proof in verify(plan, time_limit)}
    assert list(found) == ["order", "layout"]
    return found["order"]


@pytest.mark.parametrize("limit", [None, 60.0])
def test_a_cut_is_verified_independently(limit: float | None) -> None:
    proof = _of_order(branching_plan("auto"), limit)
    assert (proof.state, proof.bound, proof.independent) == (ProofState.PROVEN, 150, True)
    assert "by the minimum cut at op3: 150 B, by networkx's minimum_cut, independent of what proved it" in proof.text
    proof = _of_order(_said(branching_plan("traced"), bound=151, evidence=Evidence.CUT, proof="op3"), limit)
    assert (proof.state, proof.ok) == (ProofState.FALSE, False)


def test_a_working_set_and_an_empty_plan_are_verified() -> None:
    assert _of_order(sample_plan()).ok
    assert not _of_order(_said(sample_plan(), bound=261)).ok
    empty = diamonds(2)
    empty = dataclasses.replace(empty, ops=(), outputs=())
    assert _of_order(
        make_plan(ScheduledGraph(model="", graph=empty, schedule=order(empty), alignment=1, versions={}))
    ).ok


def test_the_moment_between_forward_and_backward_is_verified() -> None:
    plan = sample_plan()  # 160 bytes wait for the backward
    proof = _of_order(_said(plan, bound=160, evidence=Evidence.BETWEEN, proof=""))
    assert (proof.state, proof.independent) == (ProofState.PROVEN, True)
    assert _of_order(_said(plan, bound=161, evidence=Evidence.BETWEEN, proof="")).state is ProofState.FALSE


@pytest.mark.parametrize("limit", [None, 60.0])
def test_the_portfolio_s_search_is_repeated_and_labelled_so(limit: float | None) -> None:
    plan = _searched_plan()
    assert plan.schedule.evidence is Evidence.SEARCH
    proof = _of_order(plan, limit)
    assert (proof.state, proof.independent) == (ProofState.PROVEN, False)
    assert "by repeating the portfolio's search, the code that proves it first" in proof.text
    higher = plan.schedule.bound + 1
    assert _of_order(_said(plan, bound=higher, max_live=higher), limit).state is ProofState.FALSE


@pytest.mark.parametrize("policy", ["exact", "beam"])
def test_a_long_search_is_repeated(policy: str) -> None:
    proof = _of_order(_searched_plan(policy), 300.0)
    assert (proof.state, proof.independent) == (ProofState.PROVEN, False)
    assert f"by repeating the long search '{policy}'" in proof.text


def test_a_false_long_search_is_refuted() -> None:
    proof = _of_order(false_order())
    assert proof.state is ProofState.FALSE
    assert proof.text == (
        "not true: that no order of its ops needs less than 190 B; the long search 'exact' finds an order that "
        "needs 150 B"
    )


def test_a_search_that_reaches_its_limits_leaves_a_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = _searched_plan("exact")
    weaker = dataclasses.replace(plan.schedule, bound=plan.schedule.bound - 1)
    monkeypatch.setattr(proofs, "order", lambda graph, name: weaker)
    proof = _of_order(plan)
    assert proof.state is ProofState.CLAIMED
    assert "reached its limits and proves" in proof.how


def test_layouts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    (layout,) = (proof for proof in verify(branching_plan("auto")) if proof.of == "layout")
    assert (layout.state, layout.bound, layout.independent) == (ProofState.PROVEN, 150, True)
    false = false_layout()
    (layout,) = (proof for proof in verify(false) if proof.of == "layout")
    assert (layout.state, layout.how) == (ProofState.FALSE, "solving again finds an arena of 150 B")
    for bound, state in ((200, ProofState.PROVEN), (199, ProofState.CLAIMED)):
        again = dataclasses.replace(false.solution, bound=bound)
        monkeypatch.setattr(proofs, "solve", lambda problem, time_limit, again=again: again)
        (layout,) = (proof for proof in verify(false) if proof.of == "layout")
        assert (layout.state, layout.independent) == (state, False)


def test_copies_are_proved_free_of_races_again() -> None:
    """A file whose copies race cannot be loaded, and `verify` names the race of a plan that has one."""
    plan = offloaded()
    assert {proof.of for proof in verify(plan)} == {"order", "layout", "races"}
    (proof,) = (proof for proof in verify(plan) if proof.of == "races")
    assert proof.ok
    assert "vector clocks over 2 copies" in proof.text
    racing = _said(plan, order=(0, 1, 3, 2, 4, 5, 6, 7))
    refuted = proofs._races(racing)
    assert refuted.state is ProofState.FALSE
    assert "op1 and op3 use bytes [0, 256) of the arena of cpu in any order" in refuted.text
    with pytest.raises(InvalidPlan):
        check_consistency(racing)


def _sleeps() -> int:
    time.sleep(600)
    return 1


def _raises() -> int:
    raise InvalidSize("of a child")


def _dies() -> int:
    import os

    os._exit(3)


def test_a_function_is_ended_at_the_limit_and_its_errors_arrive() -> None:
    assert within(0.2, _sleeps) is None
    assert within(60.0, min, 3, 2) == 2
    with pytest.raises(InvalidSize, match="of a child"):
        within(60.0, _raises)
    with pytest.raises(MemplanError, match="exit code 3"):
        within(60.0, _dies)


@pytest.mark.parametrize(
    "error",
    [
        MemplanError("what", where="where", hint="hint"),
        UnsupportedGraph("node", "reason", "hint"),
        BudgetInfeasible("what", op="op", smallest=7),
    ],
)
def test_errors_cross_processes_whole(error: MemplanError) -> None:
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(again) is type(error)
        assert (str(again), vars(again), again.args) == (str(error), vars(error), error.args)


@given(graphs(max_ops=6))
def test_a_cut_is_the_least_that_any_order_needs_there(graph: Graph) -> None:
    for op in range(len(graph.ops)):
        assert least_at(graph, op) == brute.least_at(graph, op)


@given(graphs())
def test_cuts_are_those_of_the_prover(graph: Graph) -> None:
    assert [least_at(graph, op) for op in range(len(graph.ops))] == [
        cut_bound(graph, op) for op in range(len(graph.ops))
    ]
    if graph.ops:
        assert between_phases(graph) == cut_bound(graph, None)


def test_a_result_takes_the_bytes_of_an_input_that_nothing_needs_later() -> None:
    """x -> y in place: 64 bytes where y is made, unless another op needs x after it."""
    for reads_again, least in (((), 64), (("x",), 64), (("x", "y"), 128)):
        b = GraphBuilder()
        x, y, z = (b.storage(StorageKind.ACTIVATION, 64, planned=True) for _ in range(3))
        b.op(Phase.FORWARD, (), (x,))
        b.op(Phase.FORWARD, (x,), (y,), target="aten.tanh.default")
        if reads_again:
            b.op(Phase.FORWARD, tuple({"x": x, "y": y}[name] for name in reads_again), (z,))
        assert least_at(with_inplace_candidates(b.graph()), 1) == least


def test_the_prover_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("the prover was asked")

    for name in ("cut.cut", "cut.cut_bound", "cut.min_cut", "graph_arrays.make_graph_arrays"):
        monkeypatch.setattr(f"memplan.schedule.{name}", refuse)
    assert least_at(ladder(3), 3) == 310
