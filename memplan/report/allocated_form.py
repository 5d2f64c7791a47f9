"""Renders what was allocated beside what was planned, as sections and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memplan.analysis.allocated import Allocated
from memplan.analysis.holders import alive_at
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.report.sections import Section, columns, limited
from memplan.report.verdicts import signed

FORMAT = "memplan-allocated-1"
SHOWN = 20


def allocated_title(found: Allocated, plan: Plan) -> str:
    """Return the title, such as "run.pickle, device 0: 12.00 MiB allocated at the peak, gpt2: 11.50 MiB planned"."""
    sizes = f"{format_bytes(found.peak)} allocated at the peak, {plan.model or 'the plan'}: {format_bytes(plan.total)}"
    return f"{found.file}, device {found.device}: {sizes} planned"


def allocated_sections(found: Allocated, plan: Plan) -> Iterator[Section]:
    """Yield the totals, then what was allocated and what is planned at the peaks by source line."""
    history = (
        f"{found.events:,} events" if found.events else "no events recorded: the peak is what was alive at the end"
    )
    totals = (
        ("allocated at the peak", format_bytes(found.peak), f"{found.peak:,}", history),
        ("reserved by the allocator", format_bytes(found.reserved), f"{found.reserved:,}", "at the end"),
        ("planned total", format_bytes(plan.total), f"{plan.total:,}", "the arena and what is beside it"),
        ("planned arena", format_bytes(plan.arena_size), f"{plan.arena_size:,}", ""),
        ("difference of the totals", signed(found.peak - plan.total), f"{found.peak - plan.total:+,}", ""),
    )
    yield Section(columns=columns("memory size> bytes>@60 remark@100"), rows=totals)
    rows = [
        (*map(format_bytes, (was, planned)), signed(was - planned), line) for line, was, planned in by_line(found, plan)
    ]
    heading = "alive at the peak, by source line; parameters and inputs lie outside the arena"
    yield Section(heading=heading, columns=columns("allocated> planned> more> source"), rows=limited(rows, SHOWN))


def by_line(found: Allocated, plan: Plan) -> list[tuple[str, int, int]]:
    """Return (source line, bytes allocated at the peak, bytes in the arena at its peak), the largest first."""
    planned: Counter[str] = Counter()
    if plan.problem.buffers:
        for holder in alive_at(plan, plan.problem.peak_step):
            planned[holder.source] += holder.size
    allocated = found.by_source()
    lines = [(line, allocated.get(line, 0), planned[line]) for line in {**allocated, **planned}]
    return sorted(((line or "not recorded", a, b) for line, a, b in lines), key=lambda row: (-max(row[1:]), row[0]))


def allocated_json(found: Allocated, plan: Plan) -> dict[str, Any]:
    """Return the comparison as plain types; every size is exact, in bytes."""
    lines = [{"source": line, "allocated": was, "planned": planned} for line, was, planned in by_line(found, plan)]
    totals = {"peak": found.peak, "reserved": found.reserved, "total": plan.total, "arena": plan.arena_size}
    return {"format": FORMAT, "device": found.device, "events": found.events, **totals, "lines": lines}
