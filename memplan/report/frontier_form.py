"""Renders a `Frontier` as sections, JSON and SVG: the time under each budget, next to torch's own option."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from xml.sax.saxutils import escape

from memplan.core.jsonio import to_json
from memplan.core.units import format_bytes, format_exact, format_share
from memplan.planning.frontier import Frontier, FrontierPoint, Rival
from memplan.report.lines import printable
from memplan.report.sections import Section, columns

FORMAT = "memplan-frontier-2"
WIDTH, HEIGHT = 960, 560
LEFT, RIGHT, TOP, BOTTOM = 84, 40, 84, 64
_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#3a4048}.h{font-size:18px;font-weight:600;fill:#16191d}"
    ".g{stroke:#d9dde3}.r{text-anchor:end}.m{text-anchor:middle}.l{stroke:#2f6fd8;stroke-width:2;fill:none}"
)
_OURS, _TORCH = "#2f6fd8", "#b8520f"


def frontier_title(name: str, frontier: Frontier) -> str:
    """Return the title, such as "gpt2: memory against time, policy 'auto', costs of a100"."""
    return f"{name}: memory against time, policy {frontier.policy!r}, costs of {frontier.costs}"


def frontier_sections(frontier: Frontier, rivals: Sequence[Rival] = ()) -> Iterator[Section]:
    """Yield a table with a row per budget, then torch's points, whose option does not set a peak."""
    eager = frontier.eager
    least = next((p for p in reversed(frontier.points) if p.seconds is not None), None)
    lines = [f"predicted eager total: {format_exact(eager)}", f"without a budget: {format_exact(frontier.most)}"]
    if least is not None:
        share = format_share(least.budget / eager if eager else 0.0)
        lines.append(f"smallest budget: {format_exact(least.budget)}, {share} of the eager total")
    rows = tuple(_row(p, frontier) for p in frontier.points)
    names = "budget> share> step_time> recomputed>@70 to_the_host>@70 waiting>@90"
    yield Section(lines=tuple(lines), columns=columns(names), rows=rows)
    if rivals:
        rows = tuple(
            (r.name, format_bytes(r.total), format_share(r.total / eager if eager else 0.0), _plus(r.overhead))
            for r in sorted(rivals, key=lambda r: -r.total)
        )
        yield Section(
            heading="torch's activation_memory_budget: the peaks that it really has",
            columns=columns("asked> peak> share> step_time>"),
            rows=rows,
        )


def _row(point: FrontierPoint, frontier: Frontier) -> tuple[str, ...]:
    share = format_share(point.budget / frontier.eager if frontier.eager else 0.0)
    if point.seconds is None:
        return format_bytes(point.budget), share, "cannot be kept", "", "", ""
    return (
        *(format_bytes(point.budget), share, _plus(frontier.overhead(point))),
        *(format_bytes(point.recomputed), format_bytes(point.offloaded)),
        f"{point.stall / point.seconds * 100:.1f} %" if point.seconds else "0 %",
    )


def _plus(overhead: float) -> str:
    return f"+{overhead * 100:.2f} %"


def frontier_json(frontier: Frontier, rivals: Sequence[Rival] = ()) -> dict[str, Any]:
    """Return the frontier as plain types; sizes are in bytes, times in seconds."""
    return {"format": FORMAT, **to_json(frontier), "torch": [to_json(r) for r in rivals]}


def frontier_svg(name: str, frontier: Frontier, rivals: Sequence[Rival] = ()) -> str:
    """Return an SVG file: budgets on the x axis, overhead on the y axis. Points have a description on hover."""
    plot = Plot(frontier, rivals)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f'<style>{_STYLE}</style><rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 34, frontier_title(name, frontier), "h"),
        _text(LEFT, 58, "step time over the time without a budget, by everything that is on the device"),
    ]
    for x, label in plot.columns():
        parts.append(f'<path class="g" d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}"/>')
        parts.append(_text(x, HEIGHT - BOTTOM + 20, label, "m"))
    for y, label in plot.rows():
        parts.append(f'<path class="g" d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(_text(LEFT - 8, y + 4, label, "r"))
    line = plot.ours()
    if line:
        parts.append(f'<path class="l" d="M{" L".join(f"{x:.1f} {y:.1f}" for x, y, _ in line)}"/>')
    parts += [_dot(x, y, about, _OURS) for x, y, about in line]
    parts += [_dot(x, y, about, _TORCH) for x, y, about in plot.theirs()]
    parts.append(f'<circle cx="{LEFT + 6}" cy="{HEIGHT - 18}" r="5" fill="{_OURS}"/>')
    parts.append(_text(LEFT + 18, HEIGHT - 14, f"memplan ({frontier.policy})"))
    if rivals:
        parts.append(f'<circle cx="{LEFT + 206}" cy="{HEIGHT - 18}" r="5" fill="{_TORCH}"/>')
        parts.append(_text(LEFT + 218, HEIGHT - 14, "torch, activation_memory_budget"))
    return "\n".join((*parts, "</svg>")) + "\n"


class Plot:
    """The coordinates of the frontier's points in the picture; SVG and PNG share them."""

    def __init__(self, frontier: Frontier, rivals: Sequence[Rival]) -> None:
        self.frontier, self.rivals = frontier, rivals
        kept = [frontier.overhead(p) for p in frontier.points if p.seconds is not None]
        cheap = [r.overhead for r in rivals if r.overhead <= 3 * max([*kept, 0.1])]  # outliers do not set the scale
        self.top = max(*kept, *cheap, 0.01) * 1.08
        self.right = max(frontier.eager, frontier.most, *(r.total for r in rivals), 1) * 1.04

    def columns(self) -> list[tuple[float, str]]:
        """Return (x, label) of the vertical lines: shares of the predicted eager total."""
        return [(self._x(self.frontier.eager * k / 10), f"{k * 10} %") for k in range(1, 11)]

    def rows(self) -> list[tuple[float, str]]:
        """Return (y, label) of the horizontal lines: round percentages of overhead."""
        step = next(
            s for s in (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 1e9) if self.top / s <= 8
        )
        return [(self._y(k * step), f"+{k * step * 100:g} %") for k in range(int(self.top / step) + 1)]

    def ours(self) -> list[tuple[float, float, str]]:
        """Return (x, y, description) of each budget that can be kept."""
        found = []
        for p in self.frontier.points:
            if p.seconds is not None and p.total is not None:
                about = f"{format_bytes(p.total)}, {_plus(self.frontier.overhead(p))}"
                found.append((self._x(p.total), self._y(self.frontier.overhead(p)), about))
        return found

    def theirs(self) -> list[tuple[float, float, str]]:
        """Return (x, y, description) of torch's points; those above the picture are drawn at its edge."""
        return [
            (self._x(r.total), self._y(min(r.overhead, self.top)), f"{r.name}: {format_bytes(r.total)}, "
             f"{_plus(r.overhead)}")
            for r in self.rivals
        ]  # fmt: skip

    def _x(self, count: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * count / self.right

    def _y(self, overhead: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * overhead / self.top


def _dot(x: float, y: float, about: str, fill: str) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{fill}"><title>{escape(printable(about))}</title></circle>'


def _text(x: float, y: float, text: str, style: str = "") -> str:
    klass = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{klass}>{escape(printable(text))}</text>'
