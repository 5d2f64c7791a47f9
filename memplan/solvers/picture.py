"""Draws a placement as SVG: steps to the right, offsets upwards, one rectangle per live interval."""

from __future__ import annotations

from html import escape

from memplan.core.problem import Buffer, Problem, Solution

_COLOURS = ("#4e79a7", "#f28e2b", "#76b7b2", "#59a14f", "#edc948", "#b07aa1", "#ff9da7", "#9c755f", "#bab0ac")


def to_svg(problem: Problem, solution: Solution, *, width: int = 1000, height: int = 500) -> str:
    """The SVG of a complete placement, `width` x `height` pixels. Hovering over a rectangle shows its buffer.

    A dashed line marks the capacity, if there is one, and a dotted line the bound.
    """
    steps = [step for step, _ in problem.live_profile]
    first, last = min(steps, default=0), max(steps, default=1)
    top = max(solution.arena_size, problem.capacity or 0, 1)
    per_step, per_byte = width / max(last - first, 1), height / top
    shapes = []
    for number, b in enumerate(problem.buffers):
        if not b.size:
            continue
        offset = solution.offsets[b.id]
        y = height - (offset + b.size) * per_byte
        for segment in b.segments:
            x = (segment.start - first) * per_step
            shapes.append(
                f'<rect x="{x:.2f}" y="{y:.2f}" width="{len(segment) * per_step:.2f}" height="{b.size * per_byte:.2f}" '
                f'fill="{_COLOURS[number % len(_COLOURS)]}"><title>{_title(b, offset)}</title></rect>'
            )
    lines = [_line(height - solution.bound * per_byte, width, "2,3")]
    if problem.capacity is not None:
        lines.append(_line(height - problem.capacity * per_byte, width, "8,4"))
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif">',
            f'<rect width="{width}" height="{height}" fill="#f7f7f7"/>',
            '<g stroke="#333" stroke-width="0.3">',
            *shapes,
            "</g>",
            *lines,
            "</svg>",
            "",
        )
    )


def _title(b: Buffer, offset: int) -> str:
    where = f"bytes {offset:,} to {offset + b.size:,}, steps {b.live.start} to {b.live.end}"
    return escape(f"{b.id}: {b.size:,} bytes at {where}" + (f", {b.kind}" if b.kind else ""))


def _line(y: float, width: int, dashes: str) -> str:
    return f'<line x1="0" y1="{y:.2f}" x2="{width}" y2="{y:.2f}" stroke="#c00" stroke-dasharray="{dashes}"/>'
