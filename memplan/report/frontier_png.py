"""Renders a `Frontier` as PNG, by Pillow."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from memplan.planning.frontier import Frontier, Rival
from memplan.report.frontier_form import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Plot, frontier_title
from memplan.report.png import drawn


def frontier_png(name: str, frontier: Frontier, rivals: Sequence[Rival] = ()) -> bytes:
    """Return a PNG file. Raises `MemplanError` when Pillow is not installed."""
    plot = Plot(frontier, rivals)
    with drawn(WIDTH, HEIGHT) as (canvas, finish):
        canvas.text(LEFT, 34, frontier_title(name, frontier), "#16191d", size=18)
        for x, label in plot.columns():
            canvas.line(x, TOP, x, HEIGHT - BOTTOM, "#d9dde3")
            canvas.text(x, HEIGHT - BOTTOM + 20, label, anchor="ms")
        for y, label in plot.rows():
            canvas.line(LEFT, y, WIDTH - RIGHT, y, "#d9dde3")
            canvas.text(LEFT - 8, y, label, anchor="rm")
        line = plot.ours()
        for (x0, y0, _), (x1, y1, _) in itertools.pairwise(line):
            canvas.line(x0, y0, x1, y1, "#4c82d8")
        for points, fill in ((line, "#4c82d8"), (plot.theirs(), "#c26a1b")):
            for x, y, _ in points:
                canvas.box(x - 4, y - 4, 8, 8, fill)
        canvas.text(LEFT, HEIGHT - 14, "blue: memplan, orange: torch's activation_memory_budget")
    return finish()
