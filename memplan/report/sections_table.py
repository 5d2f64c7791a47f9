"""Renders sections for terminals of any width."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.text import Text

from memplan.report.lines import printable
from memplan.report.sections import Section
from memplan.report.table import new_table


def sections_table(title: str, sections: Iterable[Section], width: int) -> RenderableType:
    """Return the title, then every section after an empty line."""
    parts: list[RenderableType] = [_text(title, "bold")]
    for section in sections:
        parts.append(Text())
        if section.heading:
            parts.append(_text(section.heading, "bold"))
        mark = "- " if len(section.lines) > 1 else ""
        parts += [_text(mark + line) for line in section.lines]
        if section.rows:
            parts.append(_table(section, width))
    return Group(*parts)


def _table(section: Section, width: int) -> RenderableType:
    table = new_table()
    shown = [i for i, column in enumerate(section.columns) if width >= column.from_width]
    for i in shown:
        column = section.columns[i]
        justify, overflow = ("right", "ellipsis") if column.numeric else ("left", "fold")
        table.add_column(column.name, justify=justify, overflow=overflow, no_wrap=column.numeric)  # type: ignore[arg-type]
    for row in section.rows:
        table.add_row(*(_text(row[i]) for i in shown))
    return table


def _text(text: str, style: str = "") -> Text:
    return Text(printable(text), style=style)
