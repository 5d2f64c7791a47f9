"""Shows a symbolic plan as text: its symbols, its sizes for some values, and each buffer's bytes as an expression."""

from __future__ import annotations

from collections import Counter

from memplan.core.units import format_bytes, format_share
from memplan.errors import ShapeOutOfRange
from memplan.report.sections import printable
from memplan.symbolic.plan import SymbolicPlan


def symbolic_text(plan: SymbolicPlan) -> str:
    """Return the plan as plain text, with the sizes for the smallest values, the hints and the largest values."""
    graph = plan.plan.graph
    lines = [f"{plan.plan.model}: {len(graph.ops)} steps, {len(plan.plan.problem.buffers)} buffers"]
    lines += [f"  {s.name} = {s.min}..{s.max}, planned under {s.hint}" for s in plan.symbols]
    lines += [f"  where {text}" for text in plan.conditions]
    lines += [f"  input {i}: [{', '.join(shape)}]" for i, shape in enumerate(plan.inputs)]
    ends = [{s.name: getattr(s, end) for s in plan.symbols} for end in ("min", "hint", "max")]
    for values in [v for i, v in enumerate(ends) if v not in ends[:i]]:
        named = ", ".join(f"{name}={value}" for name, value in values.items())
        try:
            placed = plan.place(values)
        except ShapeOutOfRange as error:
            lines.append(f"  {named}: {error.what}")
        else:
            need = f"arena {format_bytes(placed.arena_size)}, max live {format_bytes(placed.max_live)}"
            lines.append(f"  {named}: {need}, usage {format_share(placed.usage)}")
    lines += ["", "buffer: bytes"]
    lines += [f"  {printable(b.id)}: {plan.size_of(b.id)}" for b in plan.plan.problem.buffers]
    counted = Counter(plan.size_of(b.id) for b in plan.plan.problem.buffers)
    lines += ["", "bytes: buffers", *(f"  {text}: {n}" for text, n in counted.most_common())]
    return "\n".join(lines) + "\n"
