"""The buffers of a plan as rows of plain columns, for data frames."""

from __future__ import annotations

from typing import Any

from memplan.analysis.holders import largest
from memplan.core.plan import Plan


def records(plan: Plan) -> list[dict[str, Any]]:
    """Return a row for each buffer, in the order of first use: where it is, when it is alive, and where it is from."""
    values = {plan.graph.storages[v.storage].name: v for v in reversed(plan.graph.values)}
    devices = {s.name: s.device for s in plan.graph.storages}
    holders = {holder.id: holder for holder in largest(plan)}
    found = []
    for buffer in plan.problem.buffers:
        holder, value = holders[buffer.id], values.get(buffer.id)
        found.append(
            {
                "buffer": buffer.id,
                "kind": holder.kind,
                "device": devices.get(buffer.id, ""),
                "offset": plan.solution.offsets[buffer.id],
                "nbytes": buffer.size,
                "start": holder.start,
                "end": holder.end,
                "at_peak": any(s.start <= plan.problem.peak_step < s.end for s in buffer.segments),
                "dtype": value.dtype if value else "",
                "shape": value.shape if value else (),
                "module": holder.module,
                "source": holder.source,
                "op": holder.op,
            }
        )
    return found
