"""Headings, sentences and tables as data, rendered as markdown here and for terminals in `table.py`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from memplan.analysis.holders import Holder
from memplan.core.units import format_bytes
from memplan.report.lines import op_name, printable
from memplan.report.summary import Report


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    A `numeric` column is aligned to the right and never wraps. Terminals narrower than `from_width` leave it out.
    """

    name: str
    numeric: bool = False
    from_width: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, lines of text and a table; each may be empty."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()


def columns(text: str) -> tuple[Column, ...]:
    """Return the columns that a text such as "size> module source op@100" describes.

    ">" marks a numeric column, "@100" one that is left out below 100 characters. An underscore stands for a space.
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
    """Return the first `most` rows, and one that says how many are left out."""
    if len(rows) <= most:
        return tuple(rows)
    return (*rows[:most], (f"+{len(rows) - most} more", *([""] * (len(rows[0]) - 1))))


def holders_section(heading: str, holders: Iterable[Holder]) -> Section:
    """Return a table of buffers: their sizes, kinds and steps, and where in the model they come from."""
    return Section(
        heading=heading,
        columns=columns("size> bytes>@100 kind@60 steps@60 module source@60 op"),
        rows=tuple(
            (format_bytes(h.size), f"{h.size:,}", h.kind, f"{h.start}-{h.end - 1}", h.module, h.source, op_name(h.op))
            for h in holders
        ),
    )


def table_sections(report: Report) -> tuple[Section, ...]:
    """Return the tables of a report that it has: its graphs, its largest buffers, and its ops that run functionally."""
    found = []
    if report.graphs:
        parts = ((g.name, str(g.forward + g.backward), format_bytes(g.arena_size), g.ends) for g in report.graphs)
        shown = columns("graph steps> alone> ends@100")
        found.append(Section(heading="graphs, which share the arena", columns=shown, rows=tuple(parts)))
    if report.largest:
        found.append(holders_section("largest buffers", report.largest))
    if report.functional:
        rows = (
            (op_name(f.target), str(f.calls), format_bytes(f.bytes), f"{f.bytes:,}", format_bytes(f.most))
            for f in report.functional
        )
        shown = columns("op calls> size> bytes>@100 most_at_once>@60")
        found.append(Section(heading="ops that run functionally (no out= kernel)", columns=shown, rows=tuple(rows)))
    return tuple(found)


def sections_markdown(title: str, sections: Iterable[Section]) -> str:
    """Return sections as GitHub-flavoured markdown, with cells escaped."""
    parts = [f"## {cell(title)}", *(part for section in sections for part in section_markdown(section))]
    return "\n\n".join(parts) + "\n"


def section_markdown(section: Section) -> Iterator[str]:
    """Yield the heading, the lines and the table of a section as markdown, as far as it has them."""
    if section.heading:
        yield f"### {cell(section.heading)}"
    if section.lines:
        yield "\n".join(f"- {cell(line)}" for line in section.lines)
    if section.rows:
        yield table([(" " if c.numeric else "") + c.name for c in section.columns], section.rows)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a markdown table of literal texts; a column whose header starts with a space is aligned to the right."""
    rule = ["---:" if name.startswith(" ") else "---" for name in header]
    lines = [[name.strip() for name in header], rule, *([cell(text) for text in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def cell(text: str) -> str:
    """Return `text` escaped, so that it stays in its cell and is not read as markup."""
    escaped = printable(text)
    for mark in "\\|`*_<>[]":
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped
