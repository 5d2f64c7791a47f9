"""Reads and writes buffers as CSV, the format of minimalloc and idealloc: `id,lower,upper,size[,alignment][,offset]`.

`lower` and `upper` are steps (`upper` exclusive), `size`, `alignment` and `offset` bytes. The capacity in bytes may be
part of the file name, as in `A.1048576.csv`.
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
_OPTIONAL = ("alignment", "offset")
_NUMBERS = ("lower", "upper", "size", "alignment")
_WHOLE = re.compile(r"\s*[+-]?[0-9]+\s*", re.ASCII)
_DIGITS = 18  # bytes and steps must fit into 64 bits


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """Read a problem from a CSV file.

    The columns `id,lower,upper,size` are required, in any order; `alignment` is optional. An `offset` column, which
    minimalloc writes, is a solution and is ignored. A byte order mark is skipped.

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
        missing = [name for name in _REQUIRED if name not in header]
        unknown = [name for name in header if name not in _REQUIRED + _OPTIONAL]
        if missing or unknown or len(set(header)) != len(header):
            what = f"the header is {clip(repr(','.join(header)))}" if text.strip() else "is empty: it has no header"
            hint = "the first line must be id,lower,upper,size (upper exclusive)"
            raise UnreadableFile(what, where=f"{where}:1", hint=hint)
        return tuple(
            _buffer(dict(zip(header, row, strict=False)), row, header, f"{where}:{rows.line_num}")
            for row in rows
            if row
        )
    except csv.Error as error:
        hint = "every line must be comma-separated fields; quotes must be closed"
        raise UnreadableFile(f"is not CSV: {error}", where=f"{where}:{rows.line_num}", hint=hint) from error


def _buffer(fields: dict[str, str], row: list[str], header: list[str], where: str) -> Buffer:
    if len(row) != len(header):
        hint = "give a value for every column"
        raise UnreadableFile(f"{len(row)} fields, the header has {len(header)}", where=where, hint=hint)
    numbers = {name: _number(name, fields.get(name, "1"), where) for name in _NUMBERS}
    if numbers["upper"] <= numbers["lower"]:
        what = f"upper is {numbers['upper']}, not above lower, which is {numbers['lower']}"
        raise UnreadableFile(what, where=where, hint="upper is exclusive: a buffer of one step has upper = lower + 1")
    for name, least in (("size", 0), ("alignment", 1)):
        if numbers[name] < least:
            hint = f"give a number of bytes of {least} or more"
            raise UnreadableFile(f"{name} is {numbers[name]}", where=where, hint=hint)
    live = Interval(numbers["lower"], numbers["upper"])
    return Buffer(id=fields["id"].strip(), size=numbers["size"], live=live, alignment=numbers["alignment"])


def _number(name: str, text: str, where: str) -> int:
    if _WHOLE.fullmatch(text) is None:
        what = f"{name} is {clip(repr(text))}, not a whole number"
        raise UnreadableFile(what, where=where, hint="write it in decimal digits, without a unit")
    if len(text.strip().lstrip("+-0")) > _DIGITS:
        what = f"{name} is {clip(text.strip())}, more than {_DIGITS} digits"
        raise UnreadableFile(what, where=where, hint="sizes are in bytes, lower and upper in steps")
    return int(text)


def write_solution(path: str | os.PathLike[str], problem: Problem, solution: Solution) -> None:
    """Write the columns `id,lower,upper,size,offset`, minimalloc's output format, to `path`.

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
    rows.writerow(("id", "lower", "upper", "size", "offset"))
    for b in problem.buffers:
        if b.id not in solution.offsets:
            raise InvalidSolution(
                f"has no offset: {solution.status.value}",
                violation="missing",
                where=f"buffer {b.id!r}",
                hint="write only solutions that place every buffer of this problem",
            )
        rows.writerow((b.id, b.live.start, b.live.end, b.size, solution.offsets[b.id]))
    write_atomic(Path(path), out.getvalue())
