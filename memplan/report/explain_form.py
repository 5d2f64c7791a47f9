"""Renders an `Explanation` as sections and as JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from memplan.analysis.explain import Explanation, HeldBuffer
from memplan.analysis.uses import OpAt
from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.report.lines import op_name
from memplan.report.sections import Section, columns, limited

FORMAT = "memplan-explain-1"
SHOWN = 20
GROUPS = 10


def explain_title(explanation: Explanation) -> str:
    """Return the title, such as "gpt2, step 112 (backward): aten.mm in lm_head, gpt2.py:695"."""
    return f"{explanation.model or 'plan'}, {_op(explanation.at)}"


def explain_sections(explanation: Explanation) -> Iterator[Section]:
    """Yield the live bytes, what would save memory, and the live buffers in rows and one by one."""
    e = explanation
    share = format_share(e.live / e.max_live) if e.max_live else "0 %"
    at_peak = "the peak" if e.live == e.max_live else f"{share} of the peak, {format_bytes(e.max_live)}"
    alive = f"{len(e.held)} buffers are alive: {format_exact(e.live)}, {at_peak}"
    yield Section(lines=(alive,))
    if e.levers:
        yield Section(heading="what would shrink it", lines=tuple(lever.text for lever in e.levers))
    if len(e.groups) < len(e.held):
        rows = [(format_bytes(g.bytes), str(g.count), g.kind, g.module, g.source, op_name(g.op)) for g in e.groups]
        names = "size> buffers> kind@60 module source@60 op@100"
        yield Section(heading="rows of like buffers", columns=columns(names), rows=limited(rows, GROUPS))
    if e.held:
        held = [(format_bytes(h.holder.size), h.holder.module, op_name(h.holder.op), _why(h)) for h in e.held]
        names = "size> module op why_it_is_alive"
        yield Section(heading="who is alive", columns=columns(names), rows=limited(held, SHOWN))


def _why(held: HeldBuffer) -> str:
    idle = f", untouched for {held.idle} steps" if held.idle > 1 else ""
    if held.next_use is None or held.holds_until is None:
        return f"{held.role.value}{idle}"
    if held.next_use == held.holds_until:
        return f"{held.role.value}, until {_short(held.next_use)}{idle}"
    return f"{held.role.value}, next {_short(held.next_use)}, until {_short(held.holds_until)}{idle}"


def _short(at: OpAt) -> str:
    return f"step {at.step} ({at.phase}) {op_name(at.target)}"


def _op(at: OpAt) -> str:
    module = f" in {at.module}" if at.module else ""
    return f"step {at.step} ({at.phase}) {op_name(at.target)}{module}{', ' + at.source if at.source else ''}"


def explain_json(explanation: Explanation) -> dict[str, Any]:
    """Return the explanation as plain types; every size is exact, in bytes."""
    return {"format": FORMAT, **to_json(explanation)}
