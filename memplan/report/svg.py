"""Renders the picture of an arena as SVG: steps on the x axis, offsets on y, live bytes below.

It uses no library, so it needs no extra, and every block shows its origin on hover, which matplotlib's SVG cannot.
"""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from memplan.core.units import format_bytes, format_exact
from memplan.report.frame import ARENA, HEIGHT, INNER, LEFT, RIGHT, TOP, WIDTH, about, live_y, ticks, x_of, y_of
from memplan.report.lines import printable
from memplan.report.picture import Picture, colours

_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#3a4048}.h{font-size:18px;font-weight:600;fill:#16191d}"
    ".e{stroke:#16191d;stroke-opacity:.45;fill:none}.n{fill:#5b636d}.g{stroke:#d9dde3;stroke-width:1}.b{stroke:#fff;stroke-width:.5}.p{stroke:#c23b3b;"
    "stroke-dasharray:4 3}.a{stroke:#16191d;stroke-dasharray:2 3}.r{text-anchor:end}.m{text-anchor:middle}"
)


def picture_svg(picture: Picture) -> str:
    """Return an SVG file. Every block has its origin as a title, which viewers show on hover."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(printable(picture.title))}>'
    )
    frame = f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    parts = [head, frame, *_header(picture), *_grid(picture), *_blocks(picture), *_live(picture), *_legend(picture)]
    return "\n".join((*parts, "</svg>")) + "\n"


def _header(picture: Picture) -> Iterator[str]:
    yield _text(LEFT, 32, picture.title, "h")
    figures = " · ".join(f"{label} {value}" for label, value, _ in picture.figures)
    yield _text(LEFT, 54, figures)
    for note in picture.notes[:1]:
        yield _text(LEFT, 72, note, "n")


def _grid(picture: Picture) -> Iterator[str]:
    bottom = TOP + ARENA
    for offset in ticks(picture.arena, 8, binary=True):
        y = y_of(picture, offset)
        yield f'<path class="g" d="M{LEFT} {y:.2f}H{WIDTH - RIGHT}"/>'
        yield _text(LEFT - 8, y + 4, format_bytes(offset), "r n")
    for step in ticks(picture.steps, 12):
        x = x_of(picture, step)
        yield f'<path class="g" d="M{x:.2f} {bottom}v5"/>'
        yield _text(x, bottom + 18, f"{step:,}", "m n")
    yield _text(WIDTH - RIGHT, bottom + 34, "step", "r n")


def _blocks(picture: Picture) -> Iterator[str]:
    fills = colours(picture)
    for block in picture.blocks:
        height = ARENA * block.holder.size / max(picture.arena, 1)
        top, fill = y_of(picture, block.offset + block.holder.size), fills[block.holder.kind]
        yield f'<g fill="{fill}"><title>{escape(about(block))}</title>'
        for segment in block.segments:
            x, width = x_of(picture, segment.start), INNER * len(segment) / max(picture.steps, 1)
            edge = ' class="b"' if height > 3 else ""
            yield f'<rect{edge} x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"/>'
        for one, two in zip(block.segments, block.segments[1:], strict=False):  # evicted, then back at the same offset
            y = top + height / 2
            line = f"M{x_of(picture, one.end):.2f} {y:.2f}H{x_of(picture, two.start):.2f}"
            yield f'<path d="{line}" stroke="{fill}" stroke-dasharray="3 3" fill="none"/>'
        yield "</g>"
    for arrow in picture.arrows:
        x, y = x_of(picture, arrow.end), y_of(picture, arrow.back_offset)
        dash = "" if arrow.offload else ' stroke-dasharray="5 4"'
        line = f"M{x_of(picture, arrow.start):.2f} {y_of(picture, arrow.offset):.2f}L{x:.2f} {y:.2f}"
        yield f'<path class="e" d="{line}"{dash}><title>{escape(printable(arrow.about))}</title></path>'
        yield f'<circle cx="{x:.2f}" cy="{y:.2f}" r="2.5" fill="#16191d" fill-opacity=".6"/>'
    if picture.backward_from:
        x = x_of(picture, picture.backward_from)
        yield f'<path class="a" d="M{x:.2f} {TOP - 4}v{ARENA + 4}"/>'
        yield _text(x + 5, TOP - 3, "backward", "n")


def _live(picture: Picture) -> Iterator[str]:
    """Yield the live bytes by step, with the arena and max live as lines."""
    bottom, most = live_y(picture, 0), max(picture.arena, picture.max_live)
    path, last = [f"M{LEFT} {bottom}"], 0
    for step, live in picture.profile:
        path.append(f"H{x_of(picture, step):.2f}V{live_y(picture, live):.2f}")
        last = step
    path.append(f"H{x_of(picture, max(last, picture.steps)):.2f}V{bottom}Z")
    yield f'<path d="{"".join(path)}" fill="#2f6fd8" fill-opacity=".35" stroke="#2f6fd8"/>'
    yield f'<path class="a" d="M{LEFT} {live_y(picture, picture.arena):.2f}H{WIDTH - RIGHT}"/>'
    yield f'<path class="p" d="M{LEFT} {live_y(picture, picture.max_live):.2f}H{WIDTH - RIGHT}"/>'
    x = x_of(picture, picture.peak_step + 0.5)
    yield f'<path class="p" d="M{x:.2f} {TOP}V{bottom}"/>'
    yield _text(LEFT - 8, bottom + 4, "0", "r n")
    yield _text(LEFT - 8, live_y(picture, picture.max_live) + 4, format_bytes(picture.max_live), "r n")
    yield _text(
        LEFT,
        live_y(picture, most) - 8,
        f"live bytes; max live {format_exact(picture.max_live)} at step {picture.peak_step}",
    )


def _legend(picture: Picture) -> Iterator[str]:
    x = LEFT
    for kind, fill in colours(picture).items():
        yield f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 18, HEIGHT - 12, kind or "buffer")
        x += 40 + 8 * len(kind or "buffer")


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}"{f" class={quoteattr(style)}" if style else ""}>{escape(printable(text))}</text>'
    )
