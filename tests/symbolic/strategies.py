"""Random symbolic plans: a random graph whose sizes are those of the hint, and expressions that say so."""

from __future__ import annotations

from hypothesis import strategies as st

from memplan.core.graph import Graph
from memplan.planning.make_plan import ScheduledGraph, make_plan
from memplan.planning.options import PlanOptions
from memplan.schedule import traced
from memplan.symbolic import Symbol, SymbolicPlan, make_symbolic
from memplan.symbolic.sizes import Sizes, SizesWriter, with_stable_candidates
from tests.graph_strategies import graphs, schedules


@st.composite
def symbols(draw: st.DrawFn) -> tuple[Symbol, ...]:
    """One to three symbols."""
    made = []
    for name in ("batch", "seq", "width")[: draw(st.integers(1, 3))]:
        low, hint, high = sorted(draw(st.lists(st.integers(1, 90), min_size=3, max_size=3)))
        made.append(Symbol(name=name, min=low, max=high, hint=hint))
    return tuple(made)


def _expression(draw: st.DrawFn, number: int, varying: tuple[Symbol, ...]) -> str:
    """An expression that is `number` at the hint: constant, affine, a product, rounded down, the larger of two."""
    s, t = (draw(st.sampled_from(varying)) for _ in range(2))
    factor = draw(st.sampled_from(["1", s.name, f"{s.name}*{t.name}", f"(({s.name} + 1)//2)", f"max({t.name}, 3)"]))
    at_hint = _at(factor, varying)
    return f"{number // at_hint}*{factor} + {number % at_hint}"


def _at(text: str, varying: tuple[Symbol, ...]) -> int:
    from memplan.symbolic import Expression

    return Expression(text, [s.name for s in varying]).evaluate(*(s.hint for s in varying))


@st.composite
def sizes_of(draw: st.DrawFn, graph: Graph, varying: tuple[Symbol, ...]) -> Sizes:
    """Expressions for a graph; equal sizes are now equal expressions, now not."""
    known: dict[int, str] = {}
    texts = []
    for s in graph.storages:
        if s.nbytes not in known or draw(st.booleans()):
            known[s.nbytes] = _expression(draw, s.nbytes, varying)
        texts.append(known[s.nbytes])
    views = []
    for v in graph.values:
        whole = v.shape[0] == graph.storages[v.storage].nbytes
        views.append((texts[v.storage] if whole else str(v.shape[0]), "1", "0"))
    return SizesWriter().finish(texts, views)


@st.composite
def symbolic_plans(draw: st.DrawFn, max_ops: int = 10) -> SymbolicPlan:
    """A symbolic plan of a random graph in a random legal order."""
    varying = draw(symbols())
    graph = draw(graphs(max_ops))
    sizes = draw(sizes_of(graph, varying))
    graph = with_stable_candidates(graph, sizes)
    alignment = draw(st.sampled_from([1, 64]))
    plan = make_plan(
        ScheduledGraph(
            model="random",
            graph=graph,
            schedule=draw(st.one_of(st.just(traced(graph)), schedules(graph))),
            alignment=alignment,
            redzone=draw(st.sampled_from([0, alignment])),
            versions={"memplan": "0.1.0"},
        ),
        PlanOptions(solver="greedy"),
    )
    return make_symbolic(symbols=varying, sizes=sizes, plan=plan, conditions=[f"{varying[0].name} >= 1"])


@st.composite
def values_in(draw: st.DrawFn, plan: SymbolicPlan) -> dict[str, int]:
    """A value in range for each symbol."""
    return {s.name: draw(st.integers(s.min, s.max)) for s in plan.symbols}
