"""Renders the picture of an arena as SVG: steps on the x axis, offsets on y, live bytes below.

It uses no library, so it needs no extra, and every block shows its origin on hover, which matplotlib's SVG cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle, pairwise
from xml.sax.saxutils import escape, quoteattr

from memplan.core.units import format_bytes, format_exact
from memplan.report.picture import Picture, PictureBlock, colours
from memplan.report.sections import op_name, origin, printable

WIDTH, HEIGHT = 1280, 820
LEFT, RIGHT, TOP, ARENA, LIVE = 92, 24, 84, 470, 130
INNER = WIDTH - LEFT - RIGHT
_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#3a4048}.h{font-size:18px;font-weight:600;fill:#16191d}"
    ".e{stroke:#16191d;stroke-opacity:.45;fill:none}.n{fill:#5b636d}.g{stroke:#d9dde3;stroke-width:1}.b{stroke:#fff;stroke-width:.5}.p{stroke:#c23b3b;"
    "stroke-dasharray:4 3}.a{stroke:#16191d;stroke-dasharray:2 3}.r{text-anchor:end}.m{text-anchor:middle}"
)


def picture_svg(picture: Picture) -> str:
    """Return an SVG file. Every block has its origin as a title, which viewers show on hover."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    label = quoteattr(printable(picture.title))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={label}>'
    frame = f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    parts = [head, frame, *_frame(picture), *_blocks(picture), *_live(picture), *_legend(picture)]
    return "\n".join((*parts, "</svg>")) + "\n"


def _x(picture: Picture, step: float) -> float:
    return LEFT + INNER * step / max(picture.steps, 1)


def _y(picture: Picture, offset: float) -> float:
    return TOP + ARENA * (1 - offset / max(picture.arena, 1))


def _live_y(picture: Picture, count: int) -> float:
    return HEIGHT - 40 - LIVE * count / max(picture.arena, picture.max_live, 1)


def _frame(picture: Picture) -> Iterator[str]:
    bottom = TOP + ARENA
    yield _text(LEFT, 32, picture.title, "h")
    yield _text(LEFT, 54, " · ".join(f"{label} {value}" for label, value, _ in picture.figures))
    yield from (_text(LEFT, 72, note, "n") for note in picture.answer[:1])
    for offset in ticks(picture.arena, 8, binary=True):
        y = _y(picture, offset)
        yield _path("g", f"M{LEFT} {y:.2f}H{WIDTH - RIGHT}")
        yield _text(LEFT - 8, y + 4, format_bytes(offset), "r n")
    for step in ticks(picture.steps, 12):
        yield _path("g", f"M{_x(picture, step):.2f} {bottom}v5")
        yield _text(_x(picture, step), bottom + 18, f"{step:,}", "m n")
    yield _text(WIDTH - RIGHT, bottom + 34, "step", "r n")


def ticks(most: int, count: int, *, binary: bool = False) -> list[int]:
    """Return about `count` round numbers from 0 to `most`; with `binary`, multiples of a power of two, for bytes."""
    step, factors = 1, (2, 2, 2) if binary else (2, 2.5, 2)
    for factor in cycle(factors):
        if step * count >= most:
            break
        step = int(step * factor)
    return list(range(0, most + 1, step))


def _blocks(picture: Picture) -> Iterator[str]:
    fills = colours(picture)
    for block in picture.blocks:
        height = ARENA * block.holder.size / max(picture.arena, 1)
        top, fill = _y(picture, block.offset + block.holder.size), fills[block.holder.kind]
        yield f'<g fill="{fill}"><title>{escape(_about(block))}</title>'
        for segment in block.segments:
            x, width = _x(picture, segment.start), INNER * len(segment) / max(picture.steps, 1)
            edge = ' class="b"' if height > 3 else ""
            yield f'<rect{edge} x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"/>'
        for one, two in pairwise(block.segments):  # evicted, then back at the same offset
            line = f"M{_x(picture, one.end):.2f} {top + height / 2:.2f}H{_x(picture, two.start):.2f}"
            yield f'<path d="{line}" stroke="{fill}" stroke-dasharray="3 3" fill="none"/>'
        yield "</g>"
    for arrow in picture.arrows:
        x, y = _x(picture, arrow.end), _y(picture, arrow.back_offset)
        dash = "" if arrow.offload else ' stroke-dasharray="5 4"'
        line = f"M{_x(picture, arrow.start):.2f} {_y(picture, arrow.offset):.2f}L{x:.2f} {y:.2f}"
        yield f'<path class="e" d="{line}"{dash}><title>{escape(printable(arrow.about))}</title></path>'
        yield f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.5" fill="#16191d" fill-opacity=".6"/>'
    if picture.backward_from:
        x = _x(picture, picture.backward_from)
        yield _path("a", f"M{x:.2f} {TOP - 4}v{ARENA + 4}")
        yield _text(x + 5, TOP - 3, "backward", "n")


def _about(block: PictureBlock) -> str:
    """Return a description of a block in lines: name, size and offset, steps, origin."""
    h = block.holder
    lines = (
        h.id,
        f"{format_exact(h.size)} at offset {block.offset:,}",
        f"steps {h.start} to {h.end - 1}" + (f", {h.kind}" if h.kind else ""),
        ", ".join(part for part in (origin(h), h.source, op_name(h.op)) if part and part != h.id),
    )
    return "\n".join(printable(line) for line in lines if line)


def _live(picture: Picture) -> Iterator[str]:
    """Yield the live bytes by step, with the arena and max live as lines."""
    bottom, right, most = _live_y(picture, 0), WIDTH - RIGHT, picture.max_live
    steps = "".join(f"H{_x(picture, step):.2f}V{_live_y(picture, live):.2f}" for step, live in picture.profile)
    last = max((step for step, _ in picture.profile), default=0)
    path = f"M{LEFT} {bottom}{steps}H{_x(picture, max(last, picture.steps)):.2f}V{bottom}Z"
    yield f'<path d="{path}" fill="#2f6fd8" fill-opacity=".35" stroke="#2f6fd8"/>'
    yield _path("a", f"M{LEFT} {_live_y(picture, picture.arena):.2f}H{right}")
    yield _path("p", f"M{LEFT} {_live_y(picture, most):.2f}H{right}")
    yield _path("p", f"M{_x(picture, picture.peak_step + 0.5):.2f} {TOP}V{bottom}")
    yield _text(LEFT - 8, bottom + 4, "0", "r n")
    yield _text(LEFT - 8, _live_y(picture, most) + 4, format_bytes(most), "r n")
    about = f"live bytes; max live {format_exact(most)} at step {picture.peak_step}"
    yield _text(LEFT, _live_y(picture, max(picture.arena, most)) - 8, about)


def _legend(picture: Picture) -> Iterator[str]:
    x = LEFT
    for kind, fill in colours(picture).items():
        yield f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 18, HEIGHT - 12, kind or "buffer")
        x += 40 + 8 * len(kind or "buffer")


def _path(style: str, line: str) -> str:
    return f'<path class="{style}" d="{line}"/>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    klass = f' class="{style}"' if style else ""
    return f'<text x="{x:.2f}" y="{y:.2f}"{klass}>{escape(printable(text))}</text>'
