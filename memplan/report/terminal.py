"""Renders a form with rich, for terminals of any width."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from memplan.report.sections import Form, Section, printable

_STYLES = {"ok": "green", "FAIL": "bold red", "MISSING": "bold red"}


def rendered(form: Form, width: int) -> RenderableType:
    """Return the title, then every section after an empty line."""
    parts: list[RenderableType] = [literal(form.title, "bold")] if form.title else []
    for section in form.sections:
        parts += [*([Text()] if parts else []), *_section(section, width)]
    return Group(*parts)


def _section(section: Section, width: int) -> list[RenderableType]:
    parts: list[RenderableType] = [literal(section.heading, "bold")] if section.heading else []
    mark = "- " if section.heading and len(section.lines) > 1 else ""
    parts += [literal(mark + line) for line in section.lines]
    if section.rows:
        table = Table(box=box.SIMPLE, pad_edge=False, show_edge=False)
        shown = [(i, column) for i, column in enumerate(section.columns) if width >= column.from_width]
        for _, column in shown:
            justify, overflow = ("right", "ellipsis") if column.numeric else ("left", "fold")
            table.add_column(column.name, justify=justify, overflow=overflow, no_wrap=column.numeric)  # type: ignore[arg-type]
        for k, row in enumerate(section.rows):
            cells = (literal(row[i], _STYLES.get(row[i], "")) for i, _ in shown)
            table.add_row(*cells, style="bold" if k in section.sums else "", end_section=k in section.sums)
        parts.append(table)
    return parts


def literal(text: str, style: str = "") -> Text:
    """Return `text` on one line, with control characters and markup shown as they are."""
    return Text(printable(text), style=style)
