"""Renders a `Diff` as sections and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from memplan.analysis.diff import Diff, Pair
from memplan.analysis.holders import Holder
from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.report.lines import op_name
from memplan.report.sections import Section, columns, limited
from memplan.report.verdicts import counts, place, signed

FORMAT = "memplan-diff-1"
SHOWN = 12


def diff_title(diff: Diff) -> str:
    """Return the title, such as "gpt2 -> gpt2: arena 346.8 KiB -> 489.5 KiB (+142.8 KiB)"."""
    before, after = diff.before.arena, diff.after.arena
    names = " -> ".join(name or "plan" for name in dict.fromkeys(diff.names))
    if before == after:
        return f"{names}: the arena stays {format_exact(before)}"
    return f"{names}: arena {format_exact(before)} -> {format_exact(after)} ({signed(after - before)})"


def diff_sections(diff: Diff) -> Iterator[Section]:
    """Yield the totals, then what changed at the peak, then every buffer that changed."""
    yield Section(
        lines=(_graphs(diff),), columns=columns("memory before>@60 after> change>"), rows=tuple(_totals(diff))
    )
    if diff.rows:
        rows = [(signed(g.delta), counts(g), g.kind, place(g)) for g in diff.rows]
        yield Section(
            heading="what changed at the peak",
            columns=columns("change> buffers>@60 kind@60 where"),
            rows=limited(rows, SHOWN),
        )
    for heading, pairs in (("grew", diff.grew), ("shrank", diff.shrank)):
        if pairs:
            cells = [
                (signed(b.size - a.size), format_bytes(a.size), format_bytes(b.size), *_where(b)) for a, b in pairs
            ]
            yield _section(heading, len(pairs), "change> before>@60 after>@60", cells)
    for heading, pairs in (("moved to the peak", diff.to_peak), ("left the peak", diff.off_peak)):
        if pairs:
            cells = [(format_bytes(b.size), _steps(a), _steps(b), *_where(b)) for a, b in pairs]
            yield _section(heading, len(pairs), "size> steps_before@60 steps_after@60", cells)
    for heading, holders in (("came", diff.came), ("went", diff.went)):
        if holders:
            cells = [(format_bytes(h.size), h.kind, _steps(h), *_where(h)) for h in holders]
            yield _section(heading, len(holders), "size> kind@60 steps@60", cells)


def _section(heading: str, count: int, left: str, cells: Sequence[tuple[str, ...]]) -> Section:
    heading = f"{heading}: {count} buffer{'s' if count > 1 else ''}"
    return Section(heading=heading, columns=columns(f"{left} module source@60 op"), rows=limited(cells, SHOWN))


def _graphs(diff: Diff) -> str:
    if diff.same:
        return "the plans are the same"
    if diff.same_graph:
        return "the same graph: only order or layout differ"
    return f"the graphs differ: {diff.first_difference}"


def _totals(diff: Diff) -> Iterator[tuple[str, ...]]:
    before, after = diff.before, diff.after
    lines = [
        ("peak (max live)", before.max_live, after.max_live),
        ("arena", before.arena, after.arena),
        *((kind, before.parts.get(kind, 0), after.parts.get(kind, 0)) for kind in {**before.parts, **after.parts}),
        ("outside the arena", before.outside, after.outside),
        ("total", before.total, after.total),
    ]
    for label, old, new in lines:
        yield label, format_bytes(old), format_bytes(new), _change(old, new)
    shares = [format_share(float(f.fragmentation)) for f in (before, after)]
    yield "fragmentation", *shares, "" if before.fragmentation == after.fragmentation else "changed"


def _change(old: int, new: int) -> str:
    if old == new:
        return "same"
    share = f", {'+' if new > old else ''}{format_share((new - old) / old)}" if old else ""
    return f"{signed(new - old)} ({new - old:+,} B{share})"


def _steps(holder: Holder) -> str:
    return f"{holder.start}-{holder.end - 1}"


def _where(holder: Holder) -> tuple[str, str, str]:
    return holder.module, holder.source, op_name(holder.op)


def diff_json(diff: Diff) -> dict[str, Any]:
    """Return the differences as plain types; every size is exact, in bytes."""
    data = to_json(diff)
    for name in ("grew", "shrank", "to_peak", "off_peak"):
        pairs: tuple[Pair, ...] = getattr(diff, name)
        data[name] = [{"before": to_json(a), "after": to_json(b)} for a, b in pairs]
    return {"format": FORMAT, "same": diff.same, **data}
