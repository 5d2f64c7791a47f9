"""Renders placements as plain text: steps x partitions, and addresses x steps."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from memplan.core.problem import Buffer, Problem, Solution
from memplan.report.sections import printable
from memplan.solvers.baselines.partition import partitions

_EMPTY = "*"
_WIDEST = 24
_FREE = "."


def partition_table(problem: Problem) -> str:
    """Return a table with a row per range of steps without a change and a column per partition; "*" is free.

    tract draws its memory schema like this. Below the rows are the bytes of each partition (its largest buffer), their
    sum, which is the arena of solver `partition`, and max live, the lower bound of any arena. Ids longer than a column
    are cut.
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


def stack_text(problem: Problem, solution: Solution) -> str:
    """Return a table with a row per range of bytes, highest first, and a column per range of steps without a change.

    This is the diagram of ext-tstack, with the lowest offset at the bottom. A cell is the id of the buffer that has
    those bytes then, "." if they are free. Below are the arena and max live.
    """
    buffers = [b for b in problem.buffers if b.size]
    steps = sorted({edge for b in buffers for s in b.segments for edge in (s.start, s.end)})
    edges = sorted({solution.offsets[b.id] + part for b in buffers for part in (0, b.size)} | {0})
    column, row = ({edge: k for k, edge in enumerate(sides)} for sides in (steps, edges))
    cells = [[_FREE] * max(len(steps) - 1, 0) for _ in edges[1:]]
    for b in buffers:
        offset = solution.offsets[b.id]
        for segment in b.segments:
            for line in cells[row[offset] : row[offset + b.size]]:
                for k in range(column[segment.start], column[segment.end]):
                    line[k] = printable(b.id)
    heads = [f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end in pairwise(steps)]
    labels = [f"{low}-{high}" for low, high in pairwise(edges)]
    left = max(map(len, ("bytes", *labels)))
    widths = [max(map(len, (head, *(line[k] for line in cells)))) for k, head in enumerate(heads)]
    table = [("bytes", heads), *zip(reversed(labels), reversed(cells), strict=True)]
    lines = [f"{label:>{left}} | {' | '.join(map(str.center, line, widths))}".rstrip() for label, line in table]
    return "\n".join((*lines, f"arena {solution.arena_size} bytes; max live {problem.max_live} bytes")) + "\n"
