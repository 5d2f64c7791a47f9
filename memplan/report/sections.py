"""Headings, sentences and tables, said once and drawn as markdown or for a terminal (`sections_table.py`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from memplan.report.cells import cell, table


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`numeric` aligns to the right and never breaks; a terminal narrower than `from_width` leaves it out."""

    name: str
    numeric: bool = False
    from_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, lines of text, a table; each may be empty."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def columns(text: str) -> tuple[Column, ...]:
    """Columns from "size> module source op@100": ">" is numeric, "@100" is left out below 100 characters.

    An underscore in a name stands for a space.
    """
    made = []
    for word in text.split():
        name, _, width = word.partition("@")
        made.append(
            Column(
                name=name.rstrip(">").replace("_", " "),
                numeric=name.endswith(">"),
                from_width=int(width) if width else 0,
            )
        )
    return tuple(made)


def limited(rows: Sequence[tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """The first `most` rows, and one that says how many are left out."""
    if len(rows) <= most:
        return tuple(rows)
    return (*rows[:most], (f"+{len(rows) - most} more", *([""] * (len(rows[0]) - 1))))


def sections_markdown(title: str, sections: Iterable[Section]) -> str:
    """GitHub-flavoured markdown; everything that is in a table stays there."""
    parts = [f"## {cell(title)}"]
    for section in sections:
        if section.heading:
            parts.append(f"### {cell(section.heading)}")
        if section.lines:
            parts.append("\n".join(f"- {cell(line)}" for line in section.lines))
        if section.rows:
            parts.append(table([(" " if c.numeric else "") + c.name for c in section.columns], section.rows))
    return "\n\n".join(parts) + "\n"
