"""`cpsat`: the order as a constraint program for OR-Tools, which shares no code with the other policies.

`auto` does not build on it. It is a documented choice of users (`schedule="cpsat"`), and a cross-check of the search on
graphs of some tens of ops, whose claims `memplan check --verify` knows. Positions are a permutation that keeps the
graph's edges, storages are intervals over positions, and their largest cumulative size is minimized.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memplan.core.graph import Graph
from memplan.core.interruptible import run
from memplan.core.legal_orders import predecessors
from memplan.core.schedule import Evidence, Schedule, live_bytes, working_set
from memplan.errors import UnsupportedGraph


def cpsat(graph: Graph, *, work: float = 60.0) -> Schedule:
    """Schedule `graph` by CP-SAT. The result is certified unless the deterministic time limit `work` is reached."""
    from ortools.sat.python import cp_model

    count, model = len(graph.ops), cp_model.CpModel()
    position = [model.new_int_var(0, count - 1, f"p{op}") for op in range(count)]
    model.add_all_different(position)
    for op, before in enumerate(predecessors(graph)):
        for other in before:
            model.add(position[other] < position[op])
    for op in range(graph.forward_ops):
        model.add(position[op] < graph.forward_ops)
    taken = _inplace_candidates(graph, model, position)
    sizes, intervals = [], []
    kept = {graph.values[v].storage for v in (*graph.outputs, *graph.gradients)}
    for index, storage in enumerate(graph.storages):
        users = {i: position[i] for i, op in enumerate(graph.ops) if index in graph.touched(op)}
        if not users or not storage.planned:
            continue
        start, end = model.new_int_var(0, count, ""), model.new_int_var(0, count, "")
        model.add_min_equality(start, users.values())
        ends = [p + 1 - sum(taken.get((i, index), ())) for i, p in users.items()]
        model.add_max_equality(end, ends + ([count] if index in kept else []))
        intervals.append(model.new_interval_var(start, model.new_int_var(0, count, ""), end, ""))
        sizes.append(storage.nbytes)
    peak = model.new_int_var(0, sum(sizes), "peak")
    model.add_cumulative(intervals, sizes, peak)
    model.minimize(peak)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work
    for p, hint in zip(position, range(count), strict=True):
        model.add_hint(p, hint)
    status = run(solver, model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise UnsupportedGraph(
            "cpsat", f"found no order: {solver.status_name(status)}", "use schedule='auto'", see="cpsat"
        )
    order = tuple(sorted(range(count), key=lambda op: solver.value(position[op])))
    max_live = max(live_bytes(graph, order), default=0)
    least, name = working_set(graph)
    bound = max(least, int(solver.best_objective_bound))
    evidence = Evidence.LONG_SEARCH if bound > least else Evidence.WORKING_SET
    proof = "" if bound > least else name
    return Schedule(policy="cpsat", order=order, max_live=max_live, bound=bound, evidence=evidence, proof=proof)


def _inplace_candidates(graph: Graph, model: Any, position: Sequence[Any]) -> dict[tuple[int, int], list[Any]]:
    """(op, storage) -> variables that are true if a result of the op takes the storage's bytes, which then end one step
    earlier. At most one per op is true, and only if all other users of the storage run before the op."""
    taken: dict[tuple[int, int], list[Any]] = {}
    for index, op in enumerate(graph.ops):
        chosen = [model.new_bool_var("") for _ in op.inplace_candidates]
        model.add_at_most_one(chosen)
        for variable, (_, read) in zip(chosen, op.inplace_candidates, strict=True):
            donor = graph.values[read].storage
            taken.setdefault((index, donor), []).append(variable)
            for other, user in enumerate(graph.ops):
                if other != index and donor in graph.touched(user):
                    model.add(position[other] < position[index]).only_enforce_if(variable)
    return taken
