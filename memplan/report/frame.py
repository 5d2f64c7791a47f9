"""The layout of a still picture, in points; SVG and PNG share it."""

from __future__ import annotations

from memplan.core.units import format_exact
from memplan.report.lines import op_name, origin, printable
from memplan.report.picture import Picture, PictureBlock

WIDTH, HEIGHT = 1280, 820
LEFT, RIGHT, TOP, ARENA, LIVE = 92, 24, 84, 470, 130
INNER = WIDTH - LEFT - RIGHT


def x_of(picture: Picture, step: float) -> float:
    """Return the x coordinate at which a step begins."""
    return LEFT + INNER * step / max(picture.steps, 1)


def y_of(picture: Picture, offset: float) -> float:
    """Return the y coordinate of an offset in the arena; offset 0 is at the bottom."""
    return TOP + ARENA * (1 - offset / max(picture.arena, 1))


def about(block: PictureBlock) -> str:
    """Return a description of a block in lines: name, size and offset, steps, origin."""
    h = block.holder
    lines = (
        h.id,
        f"{format_exact(h.size)} at offset {block.offset:,}",
        f"steps {h.start} to {h.end - 1}" + (f", {h.kind}" if h.kind else ""),
        ", ".join(part for part in (origin(h), h.source, op_name(h.op)) if part and part != h.id),
    )
    return "\n".join(printable(line) for line in lines if line)


def ticks(most: int, count: int, *, binary: bool = False) -> list[int]:
    """Return about `count` round numbers from 0 to `most`; with `binary`, multiples of a power of two, for bytes."""
    step = 1
    factors = (2, 2, 2) if binary else (2, 2.5, 2)
    i = 0
    while step * count < most:
        step = int(step * factors[i % 3])
        i += 1
    return list(range(0, most + 1, step))


def live_y(picture: Picture, count: int) -> float:
    """Return the y coordinate of a number of live bytes in the profile below the arena."""
    return HEIGHT - 40 - LIVE * count / max(picture.arena, picture.max_live, 1)
