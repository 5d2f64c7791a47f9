"""Renders a form with rich, for terminals of any width."""

from __future__ import annotations

import io
import re
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.containers import Lines
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


def text(form: Form) -> str:
    """Return a form as plain text without a trailing newline, as a terminal of 120 characters shows it."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    with console.capture() as shown:
        console.print(rendered(form, console.width))
    return "\n".join(line.rstrip() for line in shown.get().rstrip().splitlines())


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
    return _Literal(printable(text), style=style)


class _Literal(Text):
    """A text whose names are broken after their dots and underscores, where a line is too short for them."""

    def wrap(self, console: Console, width: int, **how: Any) -> Lines:
        names = re.sub(rf"\S{{{width + 1},}}", lambda name: _broken(name[0], width), self.plain)
        shown = self if how.get("no_wrap") else Text(names, style=self.style)
        return Text.wrap(shown, console, width, **how)


def _broken(name: str, width: int) -> str:
    lines = [""]
    for part in re.findall(r"[^._]*[._]+|[^._]+", name):
        lines = [*lines[:-1], lines[-1] + part] if len(lines[-1] + part) <= width else [*lines, part]
    return "\n".join(lines).lstrip("\n")
