"""Renders steps x partitions as plain text: which buffer is in which partition (as tract draws its memory schema)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from memplan.core.problem import Buffer, Problem
from memplan.report.lines import printable
from memplan.solvers.baselines.partition import partitions

_EMPTY = "*"
_WIDEST = 24


def partition_table(problem: Problem) -> str:
    """Return a table with a row per range of steps without a change and a column per partition; "*" is free.

    Below the rows are the bytes of each partition (its largest buffer), their sum, which is the arena of solver
    `partition`, and max live, the lower bound of any arena. Ids longer than a column are cut.
    """
    columns = partitions(problem)
    edges = sorted({edge for b in problem.buffers for s in b.segments for edge in (s.start, s.end)})
    row_of = {step: row for row, step in enumerate(edges)}
    drawn = [_column(members, row_of) for members in columns]
    sizes = [max(b.size for b in members) for members in columns]
    widths = [max(len(str(size)), *map(len, cells)) for size, cells in zip(sizes, drawn, strict=True)]
    labels = [f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end in pairwise(edges)]
    left = max(map(len, (*labels, "bytes")))
    lines = [_line("step", left, map(str, range(len(columns))), widths)]
    lines += [_line(label, left, (cells[row] for cells in drawn), widths) for row, label in enumerate(labels)]
    lines.append(_line("bytes", left, map(str, sizes), widths))
    lines.append(f"{len(columns)} partitions, {sum(sizes)} bytes; max live {problem.max_live} bytes")
    return "\n".join(lines) + "\n"


def _column(members: tuple[Buffer, ...], row_of: dict[int, int]) -> list[str]:
    """Return the buffer that is in the partition in each row."""
    cells = [_EMPTY] * max(len(row_of) - 1, 0)
    for buffer in members:
        name = printable(buffer.id)
        name = name if len(name) <= _WIDEST else name[: _WIDEST - 2] + ".."
        for segment in buffer.segments:
            rows = range(row_of[segment.start], row_of[segment.end])
            cells[rows.start : rows.stop] = [name] * len(rows)
    return cells


def _line(label: str, left: int, cells: Iterable[str], widths: list[int]) -> str:
    padded = (cell.center(width) for cell, width in zip(cells, widths, strict=True))
    return f"{label:>{left}} | {' | '.join(padded)}".rstrip()
