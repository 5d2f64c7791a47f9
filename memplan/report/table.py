"""Renders the report, and sections, with rich for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from memplan.analysis.holders import Holder
from memplan.core.units import format_bytes
from memplan.report.lines import (
    budget_lines,
    certificate,
    memory_lines,
    op_name,
    origin,
    peak_line,
    printable,
    title,
    verdict,
    waiting_lines,
)
from memplan.report.sections import Section
from memplan.report.summary import Functional, Report

WIDE = 100
NARROW = 60


class ReportTable:
    """A renderable of `report`; below `WIDE` characters some columns are left out, below `NARROW` more of them."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield render(self._report, options.max_width)


def render(report: Report, width: int) -> RenderableType:
    """Return the title, memory, the peak, advice, the largest buffers and the functional ops, as far as they exist."""
    parts: list[RenderableType] = [
        _text(title(report), "bold"),
        _text(verdict(report)),
        _text(certificate(report)),
        *map(_text, (*waiting_lines(report), *budget_lines(report))),
        _memory(report, width),
    ]
    if report.peak is not None:
        parts += [Text.assemble(("peak", "bold"), " at ", printable(peak_line(report.peak))), Text()]
    if report.advice:
        parts += [_text("what would shrink it", "bold"), *(_text(f"- {a.text}") for a in report.advice), Text()]
    if report.largest:
        parts.append(holders_table("largest buffers", report.largest, width))
    if report.functional:
        parts.append(_functional(report.functional, width))
    return Group(*parts)


def new_table() -> Table:
    """Return an empty table in the common style: a rule below the header, no sides."""
    return Table(box=box.SIMPLE, pad_edge=False, show_edge=False)


def headed(heading: str, table: Table) -> RenderableType:
    """Return a heading, the table and an empty line."""
    return Group(_text(heading, "bold"), table, Text())


def holders_table(heading: str, holders: tuple[Holder, ...], width: int) -> RenderableType:
    """Return a table of buffers with size, bytes, kind, steps and origin; on narrow terminals only size and origin."""
    table = new_table()
    table.add_column("size", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("bytes", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("kind", no_wrap=True)
        table.add_column("steps", no_wrap=True)
    table.add_column("module", overflow="fold")
    table.add_column("source", overflow="fold")
    if width >= WIDE:
        table.add_column("op", overflow="fold")
    for holder in holders:
        row = [_text(format_bytes(holder.size))]
        if width >= WIDE:
            row.append(_text(f"{holder.size:,}"))
        if width >= NARROW:
            row += [_text(holder.kind), _text(f"{holder.start}-{holder.end - 1}")]
        row += [_text(origin(holder)), _text(holder.source)]
        if width >= WIDE:
            row.append(_text(op_name(holder.op)))
        table.add_row(*row)
    return headed(heading, table)


def _memory(report: Report, width: int) -> RenderableType:
    table = new_table()
    table.add_column("memory", overflow="fold")
    table.add_column("size", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("bytes", justify="right", no_wrap=True)
    if width >= WIDE:
        table.add_column("")
    for group in memory_lines(report):
        for position, (label, size, remark) in enumerate(group):
            last = position == len(group) - 1
            row = [_text(label), _text("not measured" if size is None else format_bytes(size))]
            if width >= NARROW:
                row.append(_text("" if size is None else f"{size:,}"))
            if width >= WIDE:
                row.append(_text(remark, "dim"))
            table.add_row(*row, style="bold" if last else "", end_section=last)
    return Group(Text(), table, Text())


def _functional(rows: tuple[Functional, ...], width: int) -> RenderableType:
    table = new_table()
    table.add_column("op", overflow="fold")
    table.add_column("calls", justify="right", no_wrap=True)
    table.add_column("size", justify="right", no_wrap=True)
    if width >= NARROW:
        table.add_column("most at once", justify="right")
    for row in rows:
        cells = [_text(op_name(row.target)), _text(str(row.calls)), _text(format_bytes(row.bytes))]
        if width >= NARROW:
            cells.append(_text(format_bytes(row.most)))
        table.add_row(*cells)
    return headed("ops that run functionally (no out= kernel)", table)


def _text(text: str, style: str = "") -> Text:
    """Return `literal` for each line of a text of our own."""
    return Text("\n".join(map(printable, text.split("\n"))), style=style)


def sections_table(title: str, sections: Iterable[Section], width: int) -> RenderableType:
    """Return the title, then every section after an empty line."""
    parts: list[RenderableType] = [literal(title, "bold")]
    for section in sections:
        parts.append(Text())
        if section.heading:
            parts.append(literal(section.heading, "bold"))
        mark = "- " if len(section.lines) > 1 else ""
        parts += [literal(mark + line) for line in section.lines]
        if section.rows:
            parts.append(_section_table(section, width))
    return Group(*parts)


def _section_table(section: Section, width: int) -> RenderableType:
    table = new_table()
    shown = [i for i, column in enumerate(section.columns) if width >= column.from_width]
    for i in shown:
        column = section.columns[i]
        justify, overflow = ("right", "ellipsis") if column.numeric else ("left", "fold")
        table.add_column(column.name, justify=justify, overflow=overflow, no_wrap=column.numeric)  # type: ignore[arg-type]
    for row in section.rows:
        table.add_row(*(literal(row[i]) for i in shown))
    return table


def literal(text: str, style: str = "") -> Text:
    """Return `text` on one line, with control characters and markup shown as they are."""
    return Text(printable(text), style=style)
