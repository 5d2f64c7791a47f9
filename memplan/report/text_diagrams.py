"""Renders placements as plain text: steps x partitions, and addresses x steps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from memplan.core.problem import Buffer, Problem, Solution
from memplan.report.sections import printable
from memplan.solvers.baselines import partitions

_WIDEST = 24


def partition_table(problem: Problem) -> str:
    """Return a table with a row per range of steps without a change and a column per partition; "*" is free.

    tract draws its memory schema like this. Below the rows are the bytes of each partition (its largest buffer), their
    sum, which is the arena of solver `partition`, and max live, the lower bound of any arena. Ids longer than a column
    are cut.
    """
    columns, (edges, row) = partitions(problem), _edges(problem.buffers)
    cells = [["*"] * len(columns) for _ in edges[1:]]
    for k, members in enumerate(columns):
        for b in members:
            name = printable(b.id)
            name = name if len(name) <= _WIDEST else name[: _WIDEST - 2] + ".."
            for line in (line for s in b.segments for line in cells[row[s.start] : row[s.end]]):
                line[k] = name
    sizes = [str(max(b.size for b in members)) for members in columns]
    head = ("step", [str(k) for k in range(len(columns))])
    table = _table([head, *zip(_ranges(edges), cells, strict=True), ("bytes", sizes)])
    total = f"{len(columns)} partitions, {sum(map(int, sizes))} bytes; max live {problem.max_live} bytes"
    return f"{table}\n{total}\n"


def stack_text(problem: Problem, solution: Solution) -> str:
    """Return a table with a row per range of bytes, highest first, and a column per range of steps without a change.

    This is the diagram of ext-tstack, with the lowest offset at the bottom. A cell is the id of the buffer that has
    those bytes then, "." if they are free. Below are the arena and max live.
    """
    buffers, lies = [b for b in problem.buffers if b.size], solution.offsets
    steps, column = _edges(buffers)
    edges = sorted({lies[b.id] + part for b in buffers for part in (0, b.size)} | {0})
    row = {edge: k for k, edge in enumerate(edges)}
    cells = [["."] * max(len(steps) - 1, 0) for _ in edges[1:]]
    for b in buffers:
        for line in cells[row[lies[b.id]] : row[lies[b.id] + b.size]]:
            for k in (k for s in b.segments for k in range(column[s.start], column[s.end])):
                line[k] = printable(b.id)
    labels = [f"{low}-{high}" for low, high in pairwise(edges)]
    table = _table([("bytes", _ranges(steps)), *zip(reversed(labels), reversed(cells), strict=True)])
    return f"{table}\narena {solution.arena_size} bytes; max live {problem.max_live} bytes\n"


def _edges(buffers: Iterable[Buffer]) -> tuple[list[int], dict[int, int]]:
    """Return the steps at which something changes, ascending, and the index of each."""
    edges = sorted({edge for b in buffers for s in b.segments for edge in (s.start, s.end)})
    return edges, {edge: k for k, edge in enumerate(edges)}


def _ranges(edges: Iterable[int]) -> list[str]:
    return [f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end in pairwise(edges)]


def _table(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    left = max(len(label) for label, _ in rows)
    widths = [max(map(len, column)) for column in zip(*(cells for _, cells in rows), strict=True)]
    lines = (f"{label:>{left}} | {' | '.join(map(str.center, cells, widths))}".rstrip() for label, cells in rows)
    return "\n".join(lines)
