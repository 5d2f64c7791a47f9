"""`memplan check --verify`: what a plan says is proven again, refuted, or stays a claim."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from memplan.core.plan import Plan
from memplan.core.schedule import Evidence
from memplan.errors import BudgetInfeasible, InvalidPlan, MemplanError, UnsupportedGraph
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency
from memplan.schedule import order
from memplan.verify import Proof, ProofState, proofs, verify
from tests.core.test_happens_before import offloaded
from tests.samples import branching_plan, sample_plan
from tests.schedule.test_bound import diamonds
from tests.schedule.test_claimed import false_layout


def _said(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, schedule=dataclasses.replace(plan.schedule, **changes))


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
