"""The rows of a plan's buffers, against the plan itself."""

from __future__ import annotations

from hypothesis import given

from memplan.core.plan import Plan
from tests.graph_strategies import plans
from tests.samples import sample_plan


@given(plans())
def test_there_is_a_row_for_each_buffer(plan: Plan) -> None:
    rows = plan.to_records()
    assert [row["buffer"] for row in rows] == [b.id for b in plan.problem.buffers]
    assert max((row["offset"] + row["nbytes"] for row in rows), default=0) == plan.arena_size
    assert sum(row["nbytes"] for row in rows if row["at_peak"]) == plan.max_live
    assert all(0 <= row["start"] < row["end"] <= len(plan.schedule.order) for row in rows)
    assert len({frozenset(row) for row in rows}) <= 1, "the same columns in each row"


def test_a_row_says_where_its_buffer_is_from() -> None:
    row = next(r for r in sample_plan(alignment=1).to_records() if r["nbytes"] == 100)
    assert (row["module"], row["source"], row["kind"]) == ("h.0.attn", "model.py:12", "activation")
