"""Renders the report, and sections, with rich for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from memplan.core.units import format_bytes
from memplan.report.lines import (
    budget_lines,
    certificate,
    memory_lines,
    peak_line,
    printable,
    title,
    verdict,
    waiting_lines,
)
from memplan.report.sections import Section, table_sections
from memplan.report.summary import Report

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
    for section in table_sections(report):
        parts += [section_table(section, width), Text()]
    return Group(*parts)


def new_table() -> Table:
    """Return an empty table in the common style: a rule below the header, no sides."""
    return Table(box=box.SIMPLE, pad_edge=False, show_edge=False)


def section_table(section: Section, width: int) -> RenderableType:
    """Return the heading, the lines and the table of a section, as far as it has them."""
    parts: list[RenderableType] = [literal(section.heading, "bold")] if section.heading else []
    mark = "- " if len(section.lines) > 1 else ""
    parts += [literal(mark + line) for line in section.lines]
    if section.rows:
        parts.append(_rows(section, width))
    return Group(*parts)


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
            row = [_text(label), _text(_size(size, remark))]
            if width >= NARROW:
                row.append(_text("" if size is None else f"{size:,}"))
            if width >= WIDE:
                row.append(_text(remark, "dim"))
            table.add_row(*row, style="bold" if last else "", end_section=last)
    return Group(Text(), table, Text())


def _size(size: int | None, remark: str) -> str:
    if size is None:
        return "not known" if remark else "not measured"
    return format_bytes(size)


def _text(text: str, style: str = "") -> Text:
    """Return `literal` for each line of a text of our own."""
    return Text("\n".join(map(printable, text.split("\n"))), style=style)


def sections_table(title: str, sections: Iterable[Section], width: int) -> RenderableType:
    """Return the title, then every section after an empty line."""
    parts: list[RenderableType] = [literal(title, "bold")]
    for section in sections:
        parts += [Text(), section_table(section, width)]
    return Group(*parts)


def _rows(section: Section, width: int) -> RenderableType:
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
