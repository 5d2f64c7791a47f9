"""Buffers as CSV, the format of minimalloc and idealloc: `id,lower,upper,size[,alignment][,offset]`.

`upper` is exclusive. A capacity may stand in the file's name, as in `A.1048576.csv`.
"""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from memplan.errors import InvalidProblem, InvalidSolution, UnreadableFile
from memplan.files import write_atomic
from memplan.problem import Buffer, Interval, Problem, Solution

_REQUIRED = ("id", "lower", "upper", "size")
_OPTIONAL = ("alignment", "offset")


def read_problem(path: str | os.PathLike[str]) -> Problem:
    """Read a problem; raises `UnreadableFile` naming the line when it is none.

    Columns `id,lower,upper,size` are needed, in any order; `alignment` (bytes) is optional. An `offset`
    column, which minimalloc writes, is a solution and is ignored here.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: bytes that are no text, a name that no file can have
        raise UnreadableFile(f"cannot be read: {error}", where=str(path)) from error
    capacity = path.suffixes[-2][1:] if len(path.suffixes) >= 2 else ""
    buffers = _parse(text, str(path))
    try:
        return Problem(buffers=buffers, capacity=int(capacity) if capacity.isascii() and capacity.isdigit() else None)
    except InvalidProblem as error:
        raise UnreadableFile(str(error), where=str(path), hint="give every buffer an id of its own") from error


def _parse(text: str, where: str) -> tuple[Buffer, ...]:
    rows = csv.reader(io.StringIO(text), strict=True)
    try:
        header = [name.strip() for name in next(rows, [])]
        missing = [name for name in _REQUIRED if name not in header]
        unknown = [name for name in header if name not in _REQUIRED + _OPTIONAL]
        if missing or unknown or len(set(header)) != len(header):
            raise UnreadableFile(
                f"the header is {','.join(header) or 'missing'!r}",
                where=f"{where}:1",
                hint="the first line must be id,lower,upper,size (upper exclusive)",
            )
        return tuple(
            _buffer(dict(zip(header, row, strict=False)), row, header, f"{where}:{rows.line_num}")
            for row in rows
            if row
        )
    except csv.Error as error:
        raise UnreadableFile(str(error), where=f"{where}:{rows.line_num}") from error


def _buffer(fields: dict[str, str], row: list[str], header: list[str], where: str) -> Buffer:
    if len(row) != len(header):
        raise UnreadableFile(f"{len(row)} fields, the header has {len(header)}", where=where)
    numbers: dict[str, int] = {}
    for name in ("lower", "upper", "size", "alignment"):
        try:
            numbers[name] = int(fields.get(name, "1"))
        except ValueError as error:
            raise UnreadableFile(f"{name} is {fields[name]!r}, not a whole number", where=where) from error
    try:
        live = Interval(numbers["lower"], numbers["upper"])
        return Buffer(id=fields["id"].strip(), size=numbers["size"], live=live, alignment=numbers["alignment"])
    except InvalidProblem as error:
        raise UnreadableFile(str(error), where=where, hint="upper is exclusive and must exceed lower") from error


def write_solution(path: str | os.PathLike[str], problem: Problem, solution: Solution) -> None:
    """Write `id,lower,upper,size,offset` (minimalloc's own output format), replacing `path` in one step.

    Raises `InvalidSolution` when a buffer has no offset (nothing fitted), `UnreadableFile` when it cannot be written.
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
                hint="write only solutions that place every buffer, of this very problem",
            )
        rows.writerow((b.id, b.live.start, b.live.end, b.size, solution.offsets[b.id]))
    write_atomic(Path(path), out.getvalue())
