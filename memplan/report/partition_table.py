"""Steps x partitions as plain text: who sits where, and when (tract's picture of its memory schema)."""

from __future__ import annotations

from itertools import pairwise

from memplan.problem import Buffer, Problem
from memplan.report.lines import printable
from memplan.solve.partition import partitions

_EMPTY = "*"
_WIDEST = 24


def partition_table(problem: Problem) -> str:
    """A row per run of steps in which nothing changes, a column per partition; "*" is a free partition.

    Below the rows: the bytes of each partition (its largest buffer), their sum, which is the arena of
    solver `partition`, and max live, below which no arena can be. Ids longer than a column are cut.
    """
    columns = partitions(problem)
    steps = sorted({edge for b in problem.buffers for s in b.segments for edge in (s.start, s.end)})
    rows = [(start, end, [_at(members, start) for members in columns]) for start, end in pairwise(steps)]
    sizes = [str(max(b.size for b in members)) for members in columns]
    widths = [max(len(size), *(len(cells[i]) for _, _, cells in rows)) for i, size in enumerate(sizes)]
    labels = [f"{start}" if end == start + 1 else f"{start}-{end - 1}" for start, end, _ in rows]
    left = max((len(label) for label in (*labels, "bytes")), default=0)
    lines = [_line("step", left, [str(i) for i in range(len(columns))], widths)]
    lines += [_line(label, left, cells, widths) for label, (_, _, cells) in zip(labels, rows, strict=True)]
    lines.append(_line("bytes", left, sizes, widths))
    lines.append(f"{len(columns)} partitions, {sum(map(int, sizes))} bytes; max live {problem.max_live} bytes")
    return "\n".join(lines) + "\n"


def _at(members: tuple[Buffer, ...], step: int) -> str:
    name = next((b.id for b in members if any(s.is_alive_at_step(step) for s in b.segments)), _EMPTY)
    name = printable(name)
    return name if len(name) <= _WIDEST else name[: _WIDEST - 2] + ".."


def _line(label: str, left: int, cells: list[str], widths: list[int]) -> str:
    padded = (cell.center(width) for cell, width in zip(cells, widths, strict=True))
    return f"{label:>{left}} | {' | '.join(padded)}".rstrip()
