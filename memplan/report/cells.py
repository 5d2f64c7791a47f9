"""Tables of GitHub-flavoured markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memplan.report.lines import printable


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
