"""Claims about all orders and layouts: proven by their evidence again, refused, or shown as claims."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import pytest
from hypothesis import given

from memplan.cli import main
from memplan.core.graph import Graph, Phase, StorageKind
from memplan.core.in_place import with_inplace_candidates
from memplan.core.plan import Plan
from memplan.core.problem import Status
from memplan.errors import InvalidPlan
from memplan.planning.planfile import check_consistency, load
from memplan.report.lines import certificate, verdict
from memplan.report.summary import report_json
from memplan.schedule import Evidence, is_proven_again, order, require_evidence
from memplan.symbolic import load_symbolic
from tests.graph_strategies import GraphBuilder, graphs
from tests.samples import branching_graph, branching_plan
from tests.schedule.brute import optimum
from tests.schedule.test_bound import diamonds
from tests.symbolic.test_plan import _example


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


def false_order() -> Plan:
    """The traced order, which needs 190 bytes where 150 are possible, said to be the best of a long search."""
    plan = branching_plan("traced")
    said = dataclasses.replace(plan.schedule, bound=190, evidence=Evidence.LONG_SEARCH, proof="")
    return dataclasses.replace(plan, schedule=said)


def false_layout() -> Plan:
    """Every buffer above the one before it, 200 bytes where 150 are possible, said to be the smallest arena."""
    plan = branching_plan("auto")
    offsets, end = {}, 0
    for buffer in plan.problem.buffers:
        offsets[buffer.id] = end
        end += buffer.size
    assert plan.max_live < end
    said = dataclasses.replace(plan.solution, offsets=offsets, arena_size=end, bound=end, status=Status.OPTIMAL)
    return dataclasses.replace(plan, solution=said)


def loaded(plan: Plan, folder: Path) -> Plan:
    plan.save(folder / "plan.json")
    return load(folder / "plan.json")


def test_a_long_search_is_proven_where_it_ran_and_claimed_where_it_was_loaded(tmp_path: Path) -> None:
    plan = branching_plan("exact")
    assert plan.schedule.evidence is Evidence.LONG_SEARCH
    assert plan.schedule.certified
    assert not plan.schedule.claimed
    found = loaded(plan, tmp_path)
    assert found == plan
    assert found.schedule.claimed
    assert not found.schedule.certified
    for again in (copy.deepcopy(found), pickle.loads(pickle.dumps(found))):
        assert again.schedule.claimed


@pytest.mark.parametrize("policy", ["auto", "traced"])
def test_what_loading_proves_again_is_not_claimed(policy: str, tmp_path: Path) -> None:
    plan = branching_plan(policy)
    found = loaded(plan, tmp_path)
    assert not found.schedule.claimed
    assert not found.solution.claimed
    assert found.schedule.certified is plan.schedule.certified
    assert verdict(found.report()) == verdict(plan.report())


def test_the_false_claim_of_an_order_is_shown_as_a_claim(tmp_path: Path) -> None:
    report = loaded(false_order(), tmp_path).report()
    assert "no order can is claimed by the plan file, and was not proved again here" in verdict(report)
    assert "190 B; that no order of these ops needs less than 190 B, by a long search" in certificate(report)
    figures = report_json(report)
    assert (figures["order_claimed"], figures["order_certified"], figures["layout_claimed"]) == (True, False, False)


def test_the_false_claim_of_a_layout_is_shown_as_a_claim(tmp_path: Path) -> None:
    plan = loaded(false_layout(), tmp_path)
    assert plan.solution.claimed
    report = plan.report()
    assert "that no smaller arena than 200 B exists in this order is claimed by the plan file" in verdict(report)
    figures = report_json(report)
    assert (figures["status"], figures["layout_claimed"], figures["order_claimed"]) == ("claimed", True, False)


def test_advice_does_not_count_from_a_claim(tmp_path: Path) -> None:
    saves = {lever.name: lever.saves for lever in loaded(false_order(), tmp_path).report().advice}
    assert saves["order"] == 190 - 140  # what op2 touches
    saves = {lever.name: lever.saves for lever in loaded(false_layout(), tmp_path).report().advice}
    assert saves["layout"] == 200 - 150


_COMMANDS = (
    ("report", "plan.json"),
    ("report", "plan.json", "--format", "json"),
    ("report", "plan.json", "--format", "markdown"),
    ("report", "plan.json", "--html", "page.html"),
    ("check", "plan.json", "--max-arena", "1KiB"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "json"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "markdown"),
    ("check", "plan.json", "--max-arena", "1B", "--format", "github"),
    ("diff", "plan.json", "plan.json"),
    ("explain", "plan.json"),
)


@pytest.mark.parametrize("command", _COMMANDS, ids=" ".join)
def test_no_command_calls_a_false_claim_proven(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    false_order().save("plan.json")
    assert main(list(command)) in (0, 1)
    shown = "".join(capsys.readouterr())
    assert shown
    written = [path.read_text() for path in tmp_path.glob("*.html")]
    assert len(written) == ("--html" in command)
    for text in (shown, *written):
        assert "proven" not in text.lower()
        assert "optimal" not in text.lower().replace('"status": "optimal"', "")


def test_the_plan_of_a_symbolic_file_is_held_alike(tmp_path: Path) -> None:
    made = _example(["batch < 50"])
    said = dataclasses.replace(made.plan.schedule, bound=made.plan.schedule.max_live, evidence=Evidence.LONG_SEARCH)
    path = tmp_path / "plan.json"
    dataclasses.replace(made, plan=dataclasses.replace(made.plan, schedule=dataclasses.replace(said, proof=""))).save(
        path
    )
    assert load_symbolic(path).plan.schedule.claimed


def test_a_file_cannot_say_that_it_is_proven(tmp_path: Path) -> None:
    branching_plan("exact").save(tmp_path / "plan.json")
    assert "claimed" not in json.loads((tmp_path / "plan.json").read_text())["schedule"]
