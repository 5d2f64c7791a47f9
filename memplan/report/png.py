"""Renders the pictures of an arena and of a `Frontier` as PNG, by Pillow, for viewers that do not show SVG."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from memplan.core.units import format_bytes, format_exact
from memplan.errors import MemplanError
from memplan.planning.frontier import Frontier, Rival
from memplan.report import frontier_form
from memplan.report.frame import ARENA, HEIGHT, INNER, LEFT, RIGHT, TOP, WIDTH, live_y, ticks, x_of, y_of
from memplan.report.lines import printable
from memplan.report.picture import Picture, colours

if TYPE_CHECKING:
    from PIL.ImageDraw import ImageDraw

SCALE = 2  # pixels per point, for high-resolution screens
_DARK, _TEXT, _DIM, _LINE, _PEAK = "#16191d", "#3a4048", "#5b636d", "#d9dde3", "#c23b3b"


def picture_png(picture: Picture) -> bytes:
    """Return a PNG file of 2560 x 1640 pixels. Raises `MemplanError` when Pillow is not installed."""
    with drawn(WIDTH, HEIGHT) as (canvas, finish):
        _header(canvas, picture)
        _arena(canvas, picture)
        _live(canvas, picture)
        _legend(canvas, picture)
    return finish()


@contextmanager
def drawn(width: int, height: int) -> Iterator[tuple[Canvas, Callable[[], bytes]]]:
    """Yield a white canvas of `width` x `height` points and a function that returns its PNG file.

    Raises `MemplanError` when Pillow is not installed.
    """
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise MemplanError("PNG needs Pillow", hint="pip install 'memplan[png]', or write --svg or --html") from error
    image = Image.new("RGB", (width * SCALE, height * SCALE), "white")

    def finish() -> bytes:
        out = io.BytesIO()
        image.save(out, format="PNG", optimize=True)
        return out.getvalue()

    yield Canvas(ImageDraw.Draw(image)), finish


class Canvas:
    """An image that is drawn on in points."""

    def __init__(self, draw: ImageDraw) -> None:
        self._draw = draw

    def text(self, x: float, y: float, text: str, fill: str = _TEXT, *, size: int = 12, anchor: str = "ls") -> None:
        from PIL import ImageFont

        font: Any = ImageFont.load_default(size * SCALE)
        self._draw.text((x * SCALE, y * SCALE), printable(text), fill=fill, font=font, anchor=anchor)

    def line(self, x0: float, y0: float, x1: float, y1: float, fill: str) -> None:
        self._draw.line((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill=fill, width=SCALE)

    def box(self, x: float, y: float, wide: float, tall: float, fill: str) -> None:
        """Draw a filled rectangle, with a white edge if it is large enough for one."""
        edge = 1 if tall * SCALE > 5 and wide * SCALE > 3 else 0
        right, low = max((x + wide) * SCALE - 1 - edge, x * SCALE), max((y + tall) * SCALE - 1 - edge, y * SCALE)
        self._draw.rectangle((x * SCALE, y * SCALE, right, low), fill=fill)

    def area(self, points: list[tuple[float, float]], fill: str, outline: str) -> None:
        self._draw.polygon([(x * SCALE, y * SCALE) for x, y in points], fill=fill, outline=outline)


def _header(canvas: Canvas, picture: Picture) -> None:
    canvas.text(LEFT, 32, picture.title, _DARK, size=18)
    canvas.text(LEFT, 54, " · ".join(f"{label} {value}" for label, value, _ in picture.figures))
    canvas.text(LEFT, 72, picture.notes[0] if picture.notes else "", _DIM)


def _arena(canvas: Canvas, picture: Picture) -> None:
    for offset in ticks(picture.arena, 8, binary=True):
        canvas.line(LEFT, y_of(picture, offset), WIDTH - RIGHT, y_of(picture, offset), _LINE)
        canvas.text(LEFT - 8, y_of(picture, offset), format_bytes(offset), _DIM, anchor="rm")
    for step in ticks(picture.steps, 12):
        canvas.text(x_of(picture, step), TOP + ARENA + 18, f"{step:,}", _DIM, anchor="ms")
    fills = colours(picture)
    for block in picture.blocks:
        tall, top = ARENA * block.holder.size / max(picture.arena, 1), y_of(picture, block.offset + block.holder.size)
        for segment in block.segments:
            wide = INNER * len(segment) / max(picture.steps, 1)
            canvas.box(x_of(picture, segment.start), top, wide, tall, fills[block.holder.kind])
    for arrow in picture.arrows:
        x, y = x_of(picture, arrow.end), y_of(picture, arrow.back_offset)
        canvas.line(x_of(picture, arrow.start), y_of(picture, arrow.offset), x, y, _DARK)
        canvas.box(x - 2, y - 2, 4, 4, _DARK)  # where the bytes are back in the arena
    if picture.backward_from:
        x = x_of(picture, picture.backward_from)
        canvas.line(x, TOP - 4, x, TOP + ARENA, _DARK)
        canvas.text(x + 5, TOP - 3, "backward", _DIM)


def _live(canvas: Canvas, picture: Picture) -> None:
    points, before = [(float(LEFT), live_y(picture, 0))], 0
    for step, live in picture.profile:
        points += [(x_of(picture, step), live_y(picture, before)), (x_of(picture, step), live_y(picture, live))]
        before = live
    right = x_of(picture, picture.steps)
    canvas.area([*points, (right, live_y(picture, before)), (right, live_y(picture, 0))], "#c3d4f2", "#2f6fd8")
    for count, fill in ((picture.arena, _DARK), (picture.max_live, _PEAK)):
        canvas.line(LEFT, live_y(picture, count), WIDTH - RIGHT, live_y(picture, count), fill)
    x = x_of(picture, picture.peak_step + 0.5)
    canvas.line(x, TOP, x, live_y(picture, 0), _PEAK)
    canvas.text(LEFT - 8, live_y(picture, picture.max_live), format_bytes(picture.max_live), anchor="rm")
    top = live_y(picture, max(picture.arena, picture.max_live)) - 8
    canvas.text(LEFT, top, f"live bytes; max live {format_exact(picture.max_live)} at step {picture.peak_step}")


def _legend(canvas: Canvas, picture: Picture) -> None:
    x = LEFT
    for kind, fill in colours(picture).items():
        canvas.box(x, HEIGHT - 22, 12, 12, fill)
        canvas.text(x + 18, HEIGHT - 11, kind or "buffer")
        x += 40 + 8 * len(kind or "buffer")


def frontier_png(name: str, frontier: Frontier, rivals: Sequence[Rival] = ()) -> bytes:
    """Return a PNG file. Raises `MemplanError` when Pillow is not installed."""
    form = frontier_form
    wide, tall = form.WIDTH, form.HEIGHT
    plot = form.Plot(frontier, rivals)
    with drawn(wide, tall) as (canvas, finish):
        canvas.text(form.LEFT, 34, form.frontier_title(name, frontier), "#16191d", size=18)
        for x, label in plot.columns():
            canvas.line(x, form.TOP, x, tall - form.BOTTOM, "#d9dde3")
            canvas.text(x, tall - form.BOTTOM + 20, label, anchor="ms")
        for y, label in plot.rows():
            canvas.line(form.LEFT, y, wide - form.RIGHT, y, "#d9dde3")
            canvas.text(form.LEFT - 8, y, label, anchor="rm")
        line = plot.ours()
        for (x0, y0, _), (x1, y1, _) in itertools.pairwise(line):
            canvas.line(x0, y0, x1, y1, "#2f6fd8")
        for points, fill in ((line, "#2f6fd8"), (plot.theirs(), "#b8520f")):
            for x, y, _ in points:
                canvas.box(x - 4, y - 4, 8, 8, fill)
        canvas.text(form.LEFT, tall - 14, "blue: memplan, orange: torch's activation_memory_budget")
    return finish()
