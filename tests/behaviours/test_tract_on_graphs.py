"""tract's memory schema on a traced model: flush lists, the table (rows C2 and C6)."""

from __future__ import annotations

from benchmarks.zoo import ZOO
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.planning.options import PlanOptions
from memplan.solvers.baselines import partitions
from memplan.trace import plan


def _plan() -> Plan:
    return plan(*ZOO["gpt2"]("nano"), options=PlanOptions(gradients="outside"))


def test_C2_a_lifetime_ends_after_the_last_use_and_outputs_are_not_planned() -> None:  # noqa: N802
    p = _plan()
    graph, order = p.placed, p.schedule.order
    touches: dict[str, list[int]] = {}
    for step, op in enumerate(order):
        for s in graph.touched(graph.ops[op]):
            touches.setdefault(graph.storages[s].name, []).append(step)
    for b in p.problem.buffers:
        assert (b.live.start, b.live.end) == (touches[b.id][0], touches[b.id][-1] + 1), b.id
    planned = {b.id for b in p.problem.buffers}
    kept = {graph.storages[graph.values[v].storage].name for v in (*graph.outputs, *graph.gradients)}
    outside = {s.name for s in graph.storages if s.kind in (StorageKind.INPUT, StorageKind.PARAMETER)}
    assert kept
    assert outside
    assert not planned & (kept | outside)


def test_C6_a_table_of_steps_and_partitions() -> None:  # noqa: N802
    p = _plan()
    groups = partitions(p.problem)
    head, *rows = [line.split("|") for line in p.to_text().splitlines() if "|" in line]
    assert [cell.strip() for cell in head[1:]] == [str(i) for i in range(len(groups))], "a column for each partition"
    assert rows[-1][0].strip() == "bytes"
    assert len(rows) > 2
    assert all(len(cells) == len(groups) + 1 for cells in rows)
    text = p.to_text()
    assert str(sum(max(b.size for b in group) for group in groups)) in text.replace(",", "")
    assert str(p.max_live) in text.replace(",", "")
