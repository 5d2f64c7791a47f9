"""Renders addresses x steps as plain text, with the lowest offset at the bottom (ext-tstack's diagram)."""

from __future__ import annotations

from itertools import pairwise

from memplan.core.problem import Problem, Solution
from memplan.report.lines import printable

_FREE = "."


def stack_text(problem: Problem, solution: Solution) -> str:
    """Return a table with a row per range of bytes, highest first, and a column per range of steps without a change.

    A cell is the id of the buffer that has those bytes then, "." if they are free. Below are the arena and max live.
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
