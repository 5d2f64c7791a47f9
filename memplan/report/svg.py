"""The picture of an arena as SVG, without any library: steps to the right, offsets upwards, live bytes below."""

from __future__ import annotations

from collections.abc import Iterator
from xml.sax.saxutils import escape, quoteattr

from memplan.report.lines import op_name, origin, printable
from memplan.report.picture import Block, Picture, colours
from memplan.units import format_bytes, format_exact

WIDTH, HEIGHT = 1280, 820
_LEFT, _RIGHT, _TOP, _ARENA, _GAP, _LIVE = 92, 24, 84, 470, 52, 130
_INNER = WIDTH - _LEFT - _RIGHT
_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#3a4048}.h{font-size:18px;font-weight:600;fill:#16191d}"
    ".n{fill:#5b636d}.g{stroke:#d9dde3;stroke-width:1}.b{stroke:#fff;stroke-width:.5}.p{stroke:#c23b3b;"
    "stroke-dasharray:4 3}.a{stroke:#16191d;stroke-dasharray:2 3}.r{text-anchor:end}.m{text-anchor:middle}"
)


def picture_svg(picture: Picture) -> str:
    """A whole SVG file. Every block carries its origin as a title, which viewers show on hover."""
    size = f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-label={quoteattr(_line(picture.title))}>'
    frame = f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>'
    parts = [head, frame, *_header(picture), *_grid(picture), *_blocks(picture), *_live(picture), *_legend(picture)]
    return "\n".join((*parts, "</svg>")) + "\n"


def _x(picture: Picture, step: float) -> float:
    return _LEFT + _INNER * step / max(picture.steps, 1)


def _y(picture: Picture, offset: float) -> float:
    """Where an offset of the arena stands: 0 at the bottom."""
    return _TOP + _ARENA * (1 - offset / max(picture.arena, 1))


def _header(picture: Picture) -> Iterator[str]:
    yield _text(_LEFT, 32, picture.title, "h")
    figures = " · ".join(f"{label} {value}" for label, value, _ in picture.figures)
    yield _text(_LEFT, 54, figures)
    for note in picture.notes[:1]:
        yield _text(_LEFT, 72, note, "n")


def _grid(picture: Picture) -> Iterator[str]:
    bottom = _TOP + _ARENA
    for offset in ticks(picture.arena, 8, binary=True):
        y = _y(picture, offset)
        yield f'<path class="g" d="M{_LEFT} {y:.2f}H{WIDTH - _RIGHT}"/>'
        yield _text(_LEFT - 8, y + 4, format_bytes(offset), "r n")
    for step in ticks(picture.steps, 12):
        x = _x(picture, step)
        yield f'<path class="g" d="M{x:.2f} {bottom}v5"/>'
        yield _text(x, bottom + 18, f"{step:,}", "m n")
    yield _text(WIDTH - _RIGHT, bottom + 34, "step", "r n")


def _blocks(picture: Picture) -> Iterator[str]:
    fills = colours(picture)
    for block in picture.blocks:
        height = _ARENA * block.holder.size / max(picture.arena, 1)
        top, fill = _y(picture, block.offset + block.holder.size), fills[block.holder.kind]
        yield f'<g fill="{fill}"><title>{escape(_about(block))}</title>'
        for segment in block.segments:
            x, width = _x(picture, segment.start), _INNER * len(segment) / max(picture.steps, 1)
            edge = ' class="b"' if height > 3 else ""
            yield f'<rect{edge} x="{x:.2f}" y="{top:.2f}" width="{width:.2f}" height="{height:.2f}"/>'
        for one, two in zip(block.segments, block.segments[1:], strict=False):  # gone, and back at the same offset
            y = top + height / 2
            line = f"M{_x(picture, one.end):.2f} {y:.2f}H{_x(picture, two.start):.2f}"
            yield f'<path d="{line}" stroke="{fill}" stroke-dasharray="3 3" fill="none"/>'
        yield "</g>"
    if picture.backward_from:
        x = _x(picture, picture.backward_from)
        yield f'<path class="a" d="M{x:.2f} {_TOP - 4}v{_ARENA + 4}"/>'
        yield _text(x + 5, _TOP - 3, "backward", "n")


def _live(picture: Picture) -> Iterator[str]:
    """Live bytes by step, with the arena and max live as lines."""
    bottom, most = HEIGHT - 40, max(picture.arena, picture.max_live, 1)

    def y(count: int) -> float:
        return bottom - _LIVE * count / most

    path, last = [f"M{_LEFT} {bottom}"], 0
    for step, live in picture.profile:
        path.append(f"H{_x(picture, step):.2f}V{y(live):.2f}")
        last = step
    path.append(f"H{_x(picture, max(last, picture.steps)):.2f}V{bottom}Z")
    yield f'<path d="{"".join(path)}" fill="#4c82d8" fill-opacity=".35" stroke="#4c82d8"/>'
    yield f'<path class="a" d="M{_LEFT} {y(picture.arena):.2f}H{WIDTH - _RIGHT}"/>'
    yield f'<path class="p" d="M{_LEFT} {y(picture.max_live):.2f}H{WIDTH - _RIGHT}"/>'
    x = _x(picture, picture.peak_step + 0.5)
    yield f'<path class="p" d="M{x:.2f} {_TOP}V{bottom}"/>'
    yield _text(_LEFT - 8, bottom + 4, "0", "r n")
    yield _text(_LEFT - 8, y(picture.max_live) + 4, format_bytes(picture.max_live), "r n")
    yield _text(
        _LEFT, y(most) - 8, f"live bytes; max live {format_exact(picture.max_live)} at step {picture.peak_step}"
    )


def _legend(picture: Picture) -> Iterator[str]:
    x = _LEFT
    for kind, fill in colours(picture).items():
        yield f'<rect x="{x}" y="{HEIGHT - 22}" width="12" height="12" rx="2" fill="{fill}"/>'
        yield _text(x + 18, HEIGHT - 12, kind or "buffer")
        x += 40 + 8 * len(kind or "buffer")


def _about(block: Block) -> str:
    h = block.holder
    lines = (
        h.id,
        f"{format_exact(h.size)} at offset {block.offset:,}",
        f"steps {h.start} to {h.end - 1}" + (f", {h.kind}" if h.kind else ""),
        ", ".join(part for part in (origin(h), h.source, op_name(h.op)) if part and part != h.id),
    )
    return "\n".join(_line(line) for line in lines if line)


def ticks(most: int, count: int, *, binary: bool = False) -> list[int]:
    """Round numbers from 0 to `most`, about `count` of them; powers of two where they are bytes."""
    step = 1
    factors = (2, 2, 2) if binary else (2, 2.5, 2)
    i = 0
    while step * count < most:
        step = int(step * factors[i % 3])
        i += 1
    return list(range(0, most + 1, step))


def _text(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.2f}" y="{y:.2f}"{f" class={quoteattr(style)}" if style else ""}>{escape(_line(text))}</text>'


def _line(text: str) -> str:
    """Text that XML can hold: on one line, no control characters."""
    return printable(text)
