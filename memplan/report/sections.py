"""The model of all that is shown (a title, headings, sentences and tables), and the text formats that write it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from memplan.analysis.buffers import Holder
from memplan.analysis.lanes import Lane
from memplan.core.units import format_bytes, format_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    A `numeric` column is aligned to the right and never wraps. Terminals narrower than `from_width` leave it out.
    """

    name: str
    numeric: bool
    from_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A heading, lines of text and a table; each may be empty. `sums` are the rows that add up those above them."""

    heading: str = ""
    lines: tuple[str, ...] = ()
    columns: tuple[Column, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    sums: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """The content of a result to show: a title, sections, and for JSON the exact figures as plain types."""

    title: str
    sections: tuple[Section, ...]
    data: Any


def columns(text: str) -> tuple[Column, ...]:
    """Return the columns that a text such as "size> module source op@100" describes.

    ">" marks a numeric column, "@100" one that is left out below 100 characters. An underscore stands for a space.
    """
    parts = [(name.replace("_", " "), int(width or 0)) for name, _, width in (w.partition("@") for w in text.split())]
    return tuple(Column(name=name.strip(" >"), numeric=">" in name, from_width=width) for name, width in parts)


def limited(rows: Sequence[tuple[str, ...]], most: int) -> tuple[tuple[str, ...], ...]:
    """Return the first `most` rows, and one that says how many are left out."""
    if len(rows) <= most:
        return tuple(rows)
    return (*rows[:most], (f"+{len(rows) - most} more", *([""] * (len(rows[0]) - 1))))


def holders_section(heading: str, holders: Iterable[Holder]) -> Section:
    """Return a table of buffers: their sizes, kinds and steps, and where in the model they come from."""
    names = columns("size> bytes>@100 kind@80 steps@80 module source@60 op")
    rows = ((format_bytes(h.size), f"{h.size:,}", h.kind, steps_of(h), *where(h)) for h in holders)
    return Section(heading=heading, columns=names, rows=tuple(rows))


def lanes_section(lanes: Sequence[Lane]) -> Section:
    """Return a picture of lanes in the time of a step, from left to right: the darker, the busier."""
    shades = "·░▒▓█"
    rows = ((lane.name, seconds_of(lane.busy), "".join(shades[round(4 * s)] for s in lane.shares)) for lane in lanes)
    heading = "what is busy in the predicted time of a step"
    return Section(heading=heading, columns=columns("lane busy> from_begin_to_end@80"), rows=tuple(rows))


def seconds_of(seconds: float) -> str:
    """Return a time: "12.3 ms"."""
    return f"{seconds:,.2f} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def markdown(form: Form) -> str:
    """Return a form as GitHub-flavoured markdown, with cells escaped."""
    parts = [f"## {cell(form.title)}", *(part for section in form.sections for part in _markdown(section))]
    return "\n\n".join(parts) + "\n"


def _markdown(section: Section) -> Iterator[str]:
    if section.heading:
        yield f"### {cell(section.heading)}"
    if section.lines:
        yield "\n".join(f"- {cell(line)}" for line in section.lines)
    if section.rows:
        rule = ["---:" if column.numeric else "---" for column in section.columns]
        rows = ([f"**{c}**" if c == "FAIL" else cell(c) for c in row] for row in section.rows)
        lines = [[cell(column.name) for column in section.columns], rule, *rows]
        yield "\n".join("| " + " | ".join(line) + " |" for line in lines)


def fragment(title: str, section: Section) -> str:
    """Return a section as an HTML fragment for notebooks."""
    lines = "".join(f"<div>{escape(printable(line))}</div>" for line in section.lines)
    align = [' style="text-align:right"' if column.numeric else "" for column in section.columns]
    rows = ("".join(f"<td{a}>{escape(printable(c))}</td>" for a, c in zip(align, r, strict=True)) for r in section.rows)
    table = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div><b>{escape(printable(title))}</b>{lines}<table>{table}</table></div>"


def cell(text: str) -> str:
    """Return `text` escaped, so that it stays in its cell and is not read as markup."""
    escaped = printable(text)
    for mark in "\\|`*_<>[]":
        escaped = escaped.replace(mark, "\\" + mark)
    return escaped


def printable(text: str) -> str:
    """Return `text` on one line with control characters escaped, since names in a plan file may contain any."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def op_name(target: str) -> str:
    """Return the short name of an op: "aten.mm" for "aten.mm.default"; other overloads keep their name."""
    return target.removesuffix(".default")


def origin(holder: Holder) -> str:
    """Return the origin of a buffer: its module path, or else the op that writes it, or else its name."""
    return holder.module or op_name(holder.op) or holder.id


def where(holder: Holder) -> tuple[str, str, str]:
    """Return the module, the source line and the op of a buffer."""
    return holder.module, holder.source, op_name(holder.op)


def steps_of(holder: Holder) -> str:
    """Return the steps at which a buffer is alive: "3-7"."""
    return f"{holder.start}-{holder.end - 1}"


def signed(count: int) -> str:
    """Return a difference of bytes with its sign: "+1.50 MiB"."""
    return f"{'+' if count > 0 else ''}{format_bytes(count)}"


def percent(change: float) -> str:
    """Return a relative change: "+3.10 %"."""
    return f"{'+' if change >= 0 else ''}{format_share(change)}"
