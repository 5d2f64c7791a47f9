"""Symbolic plans: valid for every value, exact about what they need, and as files; expressions of sizes."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memplan.core.graph import Graph
from memplan.errors import InvalidPlan, MemplanError, ShapeOutOfRange
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.planfile import check_consistency, checksum
from memplan.schedule import traced
from memplan.symbolic import Expression, SymbolicPlan, load_symbolic, make_symbolic
from memplan.symbolic.sizes import evaluator, graph_at, holder
from tests.symbolic.strategies import symbolic_plans, values_in


@given(data=st.data(), plan=symbolic_plans())
def test_a_resolved_plan_is_a_plan_for_every_value(data: st.DataObject, plan: SymbolicPlan) -> None:
    values = data.draw(values_in(plan))
    resolved = plan.resolve(values)
    check_consistency(resolved)
    graph = _graph(plan, values)
    assert (resolved.graph.values, resolved.graph.storages) == (graph.values, graph.storages)
    assert plan.max_live(values) == resolved.problem.max_live <= plan.arena_size(values)
    assert plan.resolve(values) is resolved


@given(plan=symbolic_plans())
def test_for_the_hint_it_is_the_plan(plan: SymbolicPlan) -> None:
    resolved = plan.resolve(plan.hint)
    assert (resolved.graph, resolved.problem.max_live) == (plan.plan.graph, plan.plan.max_live)
    assert resolved.arena_size <= plan.plan.arena_size


@given(data=st.data(), plan=symbolic_plans())
def test_values_of_a_bucket_lie_where_its_largest_do(data: st.DataObject, plan: SymbolicPlan) -> None:
    values, within = data.draw(values_in(plan)), data.draw(values_in(plan))
    resolved, upper = plan.resolve(values, within), plan.resolve(within)
    check_consistency(resolved)
    largest = {b.id: b.size for b in upper.problem.buffers}
    if all(b.size <= largest.get(b.id, -1) for b in resolved.problem.buffers):
        assert all(resolved.solution.offsets[b.id] == upper.solution.offsets[b.id] for b in resolved.problem.buffers)


@given(plan=symbolic_plans())
@settings(max_examples=30)
def test_what_is_out_of_range_is_refused_by_name(plan: SymbolicPlan) -> None:
    first = plan.symbols[0]
    for wrong in (first.max + 1, first.min - 1, 1.5, True, None):
        with pytest.raises(ShapeOutOfRange, match=first.name):
            plan.resolve({**plan.hint, first.name: wrong})  # type: ignore[dict-item]
    with pytest.raises(ShapeOutOfRange, match="no symbol 'height'"):
        plan.resolve({**plan.hint, "height": 1})
    with pytest.raises(ShapeOutOfRange, match="has no value"):
        plan.resolve({})


def test_a_condition_that_does_not_hold_is_named() -> None:
    plan = _example(["batch*seq < 100"])
    assert plan.resolve({"batch": 2, "seq": 40}).arena_size
    with pytest.raises(ShapeOutOfRange, match=r"batch\*seq < 100"):
        plan.resolve({"batch": 4, "seq": 40})


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
    for ask in (plan.max_live, plan.resolve):
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
        (("sizes", "expressions", 0, "9"), "sizes: are not"),
        (("sizes", "expressions", 0, "open('x')"), r"sizes.expressions\[0\]"),
        (("sizes", "expressions", 0, "1 < batch"), r"sizes.expressions\[0\]"),
        (("sizes", "storages", [0]), "sizes: are not"),
        (("sizes", "storages", 0, 77), "sizes"),
        (("sizes", "views", 0, [0]), "sizes: are not"),
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
        "a/b", "max(a)", "max(a, key=b)", "abs(a)", "[a]", "a) + (b", "a # b", "a <", "", "a := 1",
        "a is b", "~a", "9" * 3000, str(2**70), "f'{a}'", "a @ b", "a << 70", "a**99", "max(*[1, 2])",
        "(a**8)**8",
    ],
)  # fmt: skip
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(InvalidPlan):
        Expression(text, ["a", "b"])


def test_a_divisor_of_zero_is_an_error_of_ours() -> None:
    with pytest.raises(InvalidPlan, match="cannot be computed for a=2"):
        Expression("8//(a - 2)", ["a"]).evaluate(2)


def test_what_is_nested_deeply_is_computed_or_an_error_of_ours() -> None:
    for text, value in (("+".join(["a"] * 990), 1980), ("-" * 1500 + "a", 2), ("(" * 990 + "a" + ")" * 990, 2)):
        with contextlib.suppress(InvalidPlan):
            assert Expression(text, ["a"]).evaluate(2) == value


def test_a_condition_that_cannot_be_computed_does_not_hold() -> None:
    held = holder(["a > 0", "a % (a - 2) == 0", "a < 9"], ["a"])
    assert held(2) == (1, 0, 1)
    assert held(3) == (1, 1, 1)
