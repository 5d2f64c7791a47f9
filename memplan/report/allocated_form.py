"""Renders what was allocated beside what was planned, as sections and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from memplan.analysis.allocated import Allocated
from memplan.analysis.holders import alive_at
from memplan.analysis.profiled import functions_of
from memplan.core.graph import StorageKind
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.report.sections import Section, columns, limited
from memplan.report.verdicts import signed

FORMAT = "memplan-allocated-1"
SHOWN = 20
STEP = "activations, gradients, temporaries"
_BESIDE = {  # what the profiler tells apart and a plan does too
    "parameters": (StorageKind.PARAMETER,),
    "optimizer state": (StorageKind.OPTIMIZER_STATE,),
    "inputs": (StorageKind.INPUT, StorageKind.CONSTANT),
}


def allocated_title(found: Allocated, plan: Plan) -> str:
    """Return the title, such as "run.pickle, device 0: 12.00 MiB allocated at the peak, gpt2: 11.50 MiB planned"."""
    sizes = f"{format_bytes(found.peak)} allocated at the peak, {plan.model or 'the plan'}: {format_bytes(plan.total)}"
    device = "" if found.device is None else f", device {found.device}"
    return f"{found.file}{device}: {sizes} planned"


def allocated_sections(found: Allocated, plan: Plan) -> Iterator[Section]:
    """Yield the totals, then what was allocated and what is planned at the peaks: by kind, or by source line."""
    history = (
        f"{found.events:,} events" if found.events else "no events recorded: the peak is what was alive at the end"
    )
    reserved = "" if found.reserved is None else format_bytes(found.reserved)
    totals = (
        ("allocated at the peak", format_bytes(found.peak), f"{found.peak:,}", history),
        *([("reserved by the allocator", reserved, f"{found.reserved:,}", "at the end")] if reserved else []),
        ("planned total", format_bytes(plan.total), f"{plan.total:,}", "the arena and what is beside it"),
        ("planned arena", format_bytes(plan.arena_size), f"{plan.arena_size:,}", ""),
        ("difference of the totals", signed(found.peak - plan.total), f"{found.peak - plan.total:+,}", ""),
    )
    yield Section(columns=columns("memory size> bytes>@60 remark@100"), rows=totals)
    if found.kinds:
        shown = columns("allocated> planned> more> kind")
        yield Section(heading="at the peak, by the profiler's kinds", columns=shown, rows=_rows(by_kind(found, plan)))
        return
    what = "function (its first line)" if found.functions else "source line"
    heading = f"alive at the peak, by {what}; parameters and inputs lie outside the arena"
    rows = _rows(by_line(found, plan))
    yield Section(heading=heading, columns=columns("allocated> planned> more> source"), rows=limited(rows, SHOWN))


def _rows(found: list[tuple[str, int, int]]) -> tuple[tuple[str, ...], ...]:
    return tuple((*map(format_bytes, (was, planned)), signed(was - planned), name) for name, was, planned in found)


def by_line(found: Allocated, plan: Plan) -> list[tuple[str, int, int]]:
    """Return (source, bytes allocated at the peak, bytes in the arena at its peak), the largest first.

    A source is a line, or the first line of a function where the recording has functions alone.
    """
    planned: Counter[str] = Counter()
    if plan.problem.buffers:
        holders = alive_at(plan, plan.problem.peak_step)
        sources = functions_of((holder.source for holder in holders), found.functions)
        for source, holder in zip(sources, holders, strict=True):
            planned[source] += holder.size
    allocated = found.by_source()
    lines = [(line, allocated.get(line, 0), planned[line]) for line in {**allocated, **planned}]
    return sorted(((line or "not recorded", a, b) for line, a, b in lines), key=lambda row: (-max(row[1:]), row[0]))


def by_kind(found: Allocated, plan: Plan) -> list[tuple[str, int, int]]:
    """Return (kind, bytes allocated at the peak, bytes planned): what a plan tells apart, and the rest of both."""
    beside = [(kind, found.kinds.get(kind, 0), plan.graph.bytes_of(*_BESIDE[kind])) for kind in _BESIDE]
    rest = (STEP, found.peak - sum(row[1] for row in beside), plan.total - sum(row[2] for row in beside))
    return [*beside, rest]


def allocated_json(found: Allocated, plan: Plan) -> dict[str, Any]:
    """Return the comparison as plain types; every size is exact, in bytes."""
    totals = {"peak": found.peak, "reserved": found.reserved, "total": plan.total, "arena": plan.arena_size}
    head = {"format": FORMAT, "device": found.device, "events": found.events, **totals}
    if found.kinds:
        kinds = [{"kind": kind, "allocated": was, "planned": planned} for kind, was, planned in by_kind(found, plan)]
        return {**head, "kinds": kinds, "recorded": dict(found.kinds)}
    lines = [{"source": line, "allocated": was, "planned": planned} for line, was, planned in by_line(found, plan)]
    return {**head, "lines": lines}
