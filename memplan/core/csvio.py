"""Reads and writes buffers as CSV, in the format of minimalloc and idealloc.

The columns are `id,lower,upper,size[,alignment][,gaps][,offset]`. `lower` and `upper` are steps (`upper` exclusive),
`size`, `alignment` and `offset` bytes; a buffer with an offset is pinned to it. `gaps` are `FIRST-END` in steps, apart
by spaces. The capacity in bytes may be part of the file name, as in `A.1048576.csv`.
"""

from __future__ import annotations

import csv
import io
import os
import re
from pathlib import Path

from memplan.core.files import write_atomic
from memplan.core.jsonio import clip
from memplan.core.problem import Buffer, Interval, Problem, Solution
from memplan.errors import InvalidProblem, InvalidSolution, UnreadableFile

_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "gaps", "offset")
_GAP = re.compile(r"(-?[0-9]+)-(-?[0-9]+)", re.ASCII)
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_DIGITS = 18  # bytes and steps must fit into 64 bits


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """Read a problem from a CSV file.

    The columns `id,lower,upper,size` are required, in any order; `alignment`, `gaps` and `offset` are optional, each
    value of the last two too. A byte order mark is skipped.

    Args:
        path: the CSV file; "NAME.CAPACITY.csv" sets the capacity in bytes.

    Returns:
        The problem, with the buffers in the order of their lines.

    Raises:
        UnreadableFile: the file cannot be read, or holds no problem; names the line.

    Example:
        >>> problem = memplan.csvio.read_problem("A.1048576.csv")
        >>> problem.capacity
        1048576
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UnreadableFile(f"cannot be read: {reason}", where=str(path), hint="give a CSV file") from error
    capacity = path.suffixes[-2][1:] if len(path.suffixes) >= 2 else ""
    return parse_problem(
        content, str(path), capacity=int(capacity) if capacity.isascii() and capacity.isdigit() else None
    )


def parse_problem(content: bytes, where: str, *, capacity: int | None = None) -> Problem:
    """Parse a problem from the bytes of a CSV file.

    Args:
        content: the file's bytes, UTF-8.
        where: the name for it in error messages.
        capacity: the problem's capacity, bytes; None for no limit.

    Returns:
        The problem, with the buffers in the order of their lines.

    Raises:
        UnreadableFile: `content` is no problem; names the line.

    Example:
        >>> parse_problem(b"id,lower,upper,size\\na,0,2,8\\n", "text").max_live
        8
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnreadableFile(f"is not UTF-8 text: {error}", where=where, hint="save it as CSV in UTF-8") from error
    buffers = _parse(text, where)
    try:
        return Problem(buffers=buffers, capacity=capacity)
    except InvalidProblem as error:
        what = f"{error.where}: {error.what}" if error.where else error.what
        raise UnreadableFile(what, where=where, hint="give every buffer an id of its own") from error


def _parse(text: str, where: str) -> tuple[Buffer, ...]:
    rows = csv.reader(io.StringIO(text, newline=None), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        if not {*_REQUIRED} <= {*header} <= {*_REQUIRED, *_OPTIONAL} or len({*header}) != len(header):
            what = f"the header is {clip(repr(','.join(header)))}" if text.strip() else "is empty: it has no header"
            hint = "the first line must be id,lower,upper,size (upper exclusive)"
            raise UnreadableFile(what, where=f"{where}:1", hint=hint)
        return tuple(_buffer(row, header, f"{where}:{rows.line_num}") for row in rows if row)
    except csv.Error as error:
        hint = "the first line must be id,lower,upper,size; every line comma-separated fields, with closed quotes"
        raise UnreadableFile(f"is not CSV: {error}", where=f"{where}:{rows.line_num}", hint=hint) from error


def _buffer(row: list[str], header: list[str], where: str) -> Buffer:
    """Return the buffer of a line. `header`: the names of the columns."""
    if len(row) != len(header):
        hint = "give a value for every column"
        raise UnreadableFile(f"{len(row)} fields, the header has {len(header)}", where=where, hint=hint)
    fields = dict(zip(header, row, strict=True))
    lower, upper, size = (_number(name, fields[name], where) for name in ("lower", "upper", "size"))
    alignment = _number("alignment", fields.get("alignment", "1"), where)
    if upper <= lower:
        hint = "upper is exclusive: a buffer of one step has upper = lower + 1"
        raise UnreadableFile(f"upper is {upper}, not above lower, which is {lower}", where=where, hint=hint)
    for name, number, least in (("size", size, 0), ("alignment", alignment, 1)):
        if number < least:
            hint = f"give a number of bytes of {least} or more"
            raise UnreadableFile(f"{name} is {number}", where=where, hint=hint)
    offset = fields.get("offset", "").strip()
    pinned = _number("offset", offset, where) if offset else None
    live, gaps = _inside(Interval(lower, upper), _gaps(fields.get("gaps", ""), where), where)
    try:
        return Buffer(
            id=fields["id"].strip(), size=size, live=live, alignment=alignment, gaps=gaps, pinned_offset=pinned
        )
    except InvalidProblem as error:
        hint = "an offset is 0 or more, and a multiple of the alignment"
        raise UnreadableFile(f"offset: {error.what}", where=where, hint=hint) from error


def _gaps(text: str, where: str) -> list[Interval]:
    """Return the gaps of a field, in which all bytes of a buffer are free."""
    found = list[Interval]()
    for written in text.split():
        match = _GAP.fullmatch(written)
        first, end = (_number("gaps", n, where) for n in match.groups()) if match else (0, 0)
        if end <= first:
            hint = "write gaps as FIRST-END, apart by spaces, as in 7-9 12-14"
            raise UnreadableFile(f"gaps has {clip(repr(written))}, which is no gap", where=where, hint=hint)
        found.append(Interval(first, end))
    return found


def _inside(live: Interval, gaps: list[Interval], where: str) -> tuple[Interval, tuple[Interval, ...]]:
    """Return the live interval without gaps at its ends, and the gaps inside of it, those that touch as one."""
    apart: list[Interval] = []
    start, end = live.start, live.end
    for gap in sorted(gaps):
        if gap.start < live.start or gap.end > live.end or (apart and gap.start < apart[-1].end):
            what = f"gaps: [{gap.start}, {gap.end}) overlaps another gap, or leaves the lifetime"
            raise UnreadableFile(what, where=where, hint="gaps are apart, and within the lifetime of their buffer")
        touches = bool(apart) and gap.start == apart[-1].end
        apart.append(Interval(apart.pop().start, gap.end) if touches else gap)
    if apart and apart[0].start == start:
        start = apart.pop(0).end
    if apart and apart[-1].end == end:
        end = apart.pop().start
    if start >= end:
        raise UnreadableFile("gaps cover the whole lifetime", where=where, hint="leave such a buffer out")
    return Interval(start, end), tuple(apart)


def _number(name: str, text: str, where: str) -> int:
    if _WHOLE.fullmatch(text) is None:
        what = f"{name} is {clip(repr(text))}, not a whole number"
        raise UnreadableFile(what, where=where, hint="write it in decimal digits, without a unit")
    if len(text.strip().lstrip("+-0")) > _DIGITS:
        what = f"{name} is {clip(text.strip())}, more than {_DIGITS} digits"
        raise UnreadableFile(what, where=where, hint="sizes are in bytes, lower and upper in steps")
    return int(text)


def write_solution(path: str | os.PathLike[str], problem: Problem, solution: Solution) -> None:
    """Write the columns `id,lower,upper,size[,alignment][,gaps],offset`, minimalloc's output format, to `path`.

    Alignments and gaps are written if a buffer has any.
    The file is replaced in one step: it is written completely or not at all.

    Args:
        path: the CSV file to write.
        problem: the buffers; sizes in bytes, live intervals in steps.
        solution: an offset in bytes for each buffer.

    Raises:
        InvalidSolution: a buffer has no offset.
        UnreadableFile: the file cannot be written.

    Example:
        >>> memplan.csvio.write_solution("solved.csv", problem, memplan.solve(problem))
    """
    out = io.StringIO()
    rows = csv.writer(out, lineterminator="\n")
    aligned = any(b.alignment != 1 for b in problem.buffers)
    gaps = any(b.gaps for b in problem.buffers)
    optional = ("alignment",) * aligned + ("gaps",) * gaps
    rows.writerow((*_REQUIRED, *optional, "offset"))
    for b in problem.buffers:
        if b.id not in solution.offsets:
            raise InvalidSolution(
                f"has no offset: {solution.status.value}",
                violation="missing",
                where=f"buffer {b.id!r}",
                hint="write only solutions that place every buffer of this problem",
            )
        said = {"alignment": b.alignment, "gaps": " ".join(f"{gap.start}-{gap.end}" for gap in b.gaps)}
        optionals = (said[name] for name in optional)
        rows.writerow((b.id, b.live.start, b.live.end, b.size, *optionals, solution.offsets[b.id]))
    write_atomic(path, out.getvalue())
