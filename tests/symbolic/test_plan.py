"""Symbolic plans: valid for every value, exact about what they need, and as files; expressions of sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.core import lifetimes
from memplan.core.graph import Graph
from memplan.core.in_place import with_inplace_candidates
from memplan.core.problem import Solution, Status
from memplan.core.schedule import make_schedule
from memplan.core.validate import validate
from memplan.errors import InvalidPlan, MemplanError, ShapeOutOfRange
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency, checksum
from memplan.schedule import order, traced
from memplan.symbolic import Expression, SymbolicPlan, load_symbolic, make_symbolic
from memplan.symbolic.sizes import evaluator, graph_at, holder
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
def test_what_is_out_of_range_is_refused_by_name(plan: SymbolicPlan) -> None:
    first = plan.symbols[0]
    for wrong in (first.max + 1, first.min - 1, 1.5, True, None):
        with pytest.raises(ShapeOutOfRange, match=first.name):
            plan.place({**plan.hint, first.name: wrong})  # type: ignore[dict-item]
    with pytest.raises(ShapeOutOfRange, match="no symbol 'height'"):
        plan.resolve({**plan.hint, "height": 1})
    with pytest.raises(ShapeOutOfRange, match="has no value"):
        plan.place({})


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


@given(plan=symbolic_plans())
def test_what_is_saved_is_loaded_equal(plan: SymbolicPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()
    found = load_symbolic(path)
    assert found == plan
    found.save(path)
    assert path.read_bytes() == before


def _changed(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "plan.json"
    _example(["batch < 50"]).save(path)
    data = json.loads(path.read_text())
    change(data)
    head = ("symbolic_version", "fingerprint", "checksum")
    data["checksum"] = checksum({k: v for k, v in data.items() if k not in head})
    path.write_text(json.dumps(data))
    return path


def _set(data: Any, *keys: Any) -> None:
    *path, last, value = keys
    for key in path:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        (("symbolic_version", 1), "symbolic version 1"),
        (("symbolic_version", None), "no symbolic_version"),
        (("extra", 1), "symbolic.extra"),
        (("symbols", 0, "name", "class"), r"symbols\[0\].name"),
        (("symbols", 0, "name", "batch size"), r"symbols\[0\].name"),
        (("symbols", 0, "min", 0), r"symbols\[0\]"),
        (("symbols", 0, "hint", 99), r"symbols\[0\].hint"),
        (("symbols", 1, "name", "batch"), r"symbols\[1\].name"),
        (("conditions", 0, "batch.real < 50"), r"conditions\[0\]"),
        (("conditions", 0, "batch + 50"), r"conditions\[0\]"),
        (("inputs", [["__import__"]]), r"inputs\[0\]"),
        (("sizes", "expressions", 0, "9"), r"sizes.storages\[0\]"),
        (("sizes", "expressions", 0, "open('x')"), r"sizes.expressions\[0\]"),
        (("sizes", "expressions", 0, "1 < batch"), r"sizes.expressions\[0\]"),
        (("sizes", "storages", [0]), "sizes.storages"),
        (("sizes", "storages", 0, 77), "sizes"),
        (("sizes", "views", 0, [0]), r"sizes.views\[0\]"),
        (("plan", "solution", "offsets", "activation_2", 0), "wrong arena size"),
        (("fingerprint", "0" * 64), "fingerprint"),
    ],
)
def test_a_file_that_was_changed_on_purpose_is_refused_by_path(tmp_path: Path, keys: Any, where: str) -> None:
    path = _changed(tmp_path, lambda data: _set(data, *keys))
    with pytest.raises(MemplanError, match=where):
        load_symbolic(path)


@given(a=st.integers(1, 10**6), b=st.integers(1, 10**6))
def test_numbers_are_exact(a: int, b: int) -> None:
    texts = ["4*a*b*(b - 1)//2", "max(1, a - 1)", "a**3 % b", "-(a + 1)//2", "a < b and not a == 1", "min(a, b, 7)"]
    expected = (4 * a * b * (b - 1) // 2, max(1, a - 1), a**3 % b, -(a + 1) // 2, a < b and a != 1, min(a, b, 7))
    assert evaluator(texts, ["a", "b"])(a, b) == expected
    assert [Expression(t, ["a", "b"]).evaluate(a, b) for t in texts] == list(expected)


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')", "a.real", "a[0]", "lambda: 1", "1.5*a", "'a'", "True", "c", "a if b else 1", "a**b",
        "a/b", "max(a)", "max(a, key=b)", "abs(a)", "[a]", "a and b", "1 + (a < b)", "a <", "", "a := 1",
        "a is b", "~a", "9" * 3000, str(2**70), "f'{a}'", "a @ b", "a << 70", "a**99", "max(*[1, 2])",
        "(a**8)**8", "-" * 1500 + "a",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan):
        Expression(text, ["a", "b"])


def test_a_divisor_of_zero_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidPlan, match="cannot be computed for a=2"):
        Expression("8//(a - 2)", ["a"]).evaluate(2)


def test_what_is_nested_too_deeply_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidPlan, match="too deeply"):
        Expression("+".join(["a"] * 990), ["a"]).evaluate(2)


def test_a_condition_that_cannot_be_computed_does_not_hold() -> None:
    held = holder(["a > 0", "a % (a - 2) == 0", "a < 9"], ["a"])
    assert held(2) == (1, 0, 1)
    assert held(3) == (1, 1, 1)
