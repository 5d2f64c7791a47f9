"""Symbolic plans: valid for every value, no worse than the plan for the hint, exact about what they need."""

from __future__ import annotations

import copy
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.in_place import with_inplace_candidates
from memplan.core.problem import Solution, Status
from memplan.core.validate import validate
from memplan.errors import InvalidPlan, ShapeOutOfRange, UnknownName
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency
from memplan.schedule import make_schedule, order, traced
from memplan.symbolic import SymbolicPlan, make_symbolic
from memplan.symbolic.sizes import graph_at
from tests.symbolic.strategies import symbolic_plans, values_in


@given(data=st.data(), plan=symbolic_plans())
def test_a_placement_is_valid_for_every_value(data: st.DataObject, plan: SymbolicPlan) -> None:
    values = data.draw(values_in(plan))
    placed = plan.place(values)
    graph = _graph(plan, values)
    schedule = make_schedule(graph, plan.plan.schedule.order, "traced")
    problem = lifetimes.problem(graph, schedule, alignment=plan.plan.alignment, redzone=plan.plan.redzone)
    solution = Solution(
        offsets=placed.offsets, arena_size=placed.arena_size, status=Status.FEASIBLE, bound=0, solver="symbolic"
    )
    validate(problem, solution)
    assert placed.max_live == problem.max_live
    assert 0 < placed.usage <= 1


@given(plan=symbolic_plans())
def test_for_the_hint_nothing_is_lost(plan: SymbolicPlan) -> None:
    assert plan.place(plan.hint).arena_size <= plan.plan.arena_size
    assert plan.place(plan.hint).max_live == plan.plan.max_live
    resolved = plan.resolve(plan.hint)  # which is planned anew where the order of the plan was far from the best
    assert resolved.graph == plan.plan.graph or resolved.arena_size < plan.plan.arena_size


@given(data=st.data(), plan=symbolic_plans())
def test_a_resolved_plan_is_a_plan_within_a_quarter_of_planning_anew(data: st.DataObject, plan: SymbolicPlan) -> None:
    values = data.draw(values_in(plan))
    resolved = plan.resolve(values)
    check_consistency(resolved)
    graph = _graph(plan, values)
    assert (resolved.graph.values, resolved.graph.storages) == (graph.values, graph.storages)
    graph = with_inplace_candidates(graph) if any(op.inplace_candidates for op in graph.ops) else graph
    anew = make_plan(
        ScheduledGraph(model="anew", graph=graph, schedule=order(graph), alignment=plan.plan.alignment, versions={})
    )
    assert plan.plan.redzone or resolved.arena_size <= 1.25 * anew.arena_size
    assert plan.resolve(values) is resolved


@given(plan=symbolic_plans())
@settings(max_examples=30)
def test_copies_are_equal(plan: SymbolicPlan) -> None:
    plan.resolve(plan.hint)
    assert copy.deepcopy(plan) == plan
    assert pickle.loads(pickle.dumps(plan)) == plan


@given(plan=symbolic_plans())
@settings(max_examples=30)
def test_what_is_out_of_range_is_refused_by_name(plan: SymbolicPlan) -> None:
    first = plan.symbols[0]
    for wrong in (first.max + 1, first.min - 1, 1.5, True, None):
        with pytest.raises(ShapeOutOfRange, match=first.name):
            plan.place({**plan.hint, first.name: wrong})  # type: ignore[dict-item]
    with pytest.raises(ShapeOutOfRange, match="no symbol 'height'"):
        plan.resolve({**plan.hint, "height": 1})
    with pytest.raises(ShapeOutOfRange, match="has no value"):
        plan.place({})


@given(plan=symbolic_plans())
@settings(max_examples=20)
def test_the_text_has_every_symbol_and_buffer(plan: SymbolicPlan) -> None:
    text = plan.to_text()
    assert all(s.name in text for s in plan.symbols)
    assert all(f"{b.id}: {plan.size_of(b.id)}" in text for b in plan.plan.problem.buffers)
    with pytest.raises(UnknownName, match="no storage 'nobody'"):
        plan.size_of("nobody")


def test_a_condition_that_does_not_hold_is_named() -> None:
    plan = _example(["batch*seq < 100"])
    assert plan.place({"batch": 2, "seq": 40}).arena_size
    with pytest.raises(ShapeOutOfRange, match=r"batch\*seq < 100"):
        plan.place({"batch": 4, "seq": 40})


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"conditions": ("batch > 8",)}, "do not hold for the hint"),
        ({"conditions": ("batch",)}, "is not a condition"),
        ({"symbols": ()}, "not allowed"),
    ],
)
def test_parts_that_do_not_belong_together_are_refused(change: dict[str, object], complaint: str) -> None:
    plan = _example([])
    parts = {name: getattr(plan, name) for name in ("symbols", "conditions", "plan", "sizes")}
    with pytest.raises(InvalidPlan, match=complaint):
        make_symbolic(**{**parts, **change})


def test_negative_sizes_are_out_of_range() -> None:
    plan = _example([], times="5 - 2*batch")
    for ask in (plan.place, plan.resolve):
        with pytest.raises(ShapeOutOfRange, match="negative"):
            ask({"batch": 4, "seq": 3})


def _graph(plan: SymbolicPlan, values: dict[str, int]) -> Graph:
    from memplan.symbolic.sizes import evaluator

    numbers = evaluator(plan.sizes.expressions, list(plan.hint))(*values.values())
    return graph_at(plan.plan.graph, plan.sizes, numbers)


def _example(conditions: list[str], power: int = 1, highest: int = 64, times: str = "1") -> SymbolicPlan:
    from memplan.core.graph import Phase, StorageKind
    from memplan.symbolic import Symbol
    from memplan.symbolic.sizes import SizesWriter
    from tests.graph_strategies import GraphBuilder

    b = GraphBuilder()
    given_ = b.storage(StorageKind.INPUT, 8, planned=False)
    one = b.storage(StorageKind.ACTIVATION, 2 * 2**power, planned=True)
    two = b.storage(StorageKind.ACTIVATION, 4, planned=True)
    b.op(Phase.FORWARD, (given_,), (one,))
    b.op(Phase.FORWARD, (one,), (two,))
    graph = b.graph()
    texts = ["8", f"batch*seq**{power}", f"batch*seq*({times})"]
    symbols = tuple(Symbol(name=n, min=1, max=highest, hint=2) for n in ("batch", "seq"))
    sizes = SizesWriter().finish(texts, [(t, "1", "0") for t in texts])
    plan = make_plan(ScheduledGraph(model="two", graph=graph, schedule=traced(graph), alignment=1, versions={}))
    return make_symbolic(symbols=symbols, sizes=sizes, plan=plan, conditions=conditions)
