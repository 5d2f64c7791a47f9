"""Draws GB against time, memplan's points and torch's in one: `docs/images/gpu-frontier.svg`, for `docs/guides/gpu.md`.

    python -m benchmarks.frontier_picture

Full points are measured (`results/gpu.json`, relative to torch.compile in the same run). Hollow ones are planned
(`results/predicted.json`): the time of memplan without a budget there, times what the budget is predicted to add.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import RESULTS

PICTURE = Path(__file__).parents[1] / "docs" / "images" / "gpu-frontier.svg"
MODELS = {"gpt2": "GPT-2 124M, 8 x 1,024 tokens", "llama1b": "Llama 1B, 2 x 2,048 tokens"}
_WIDTH, _HEIGHT, _LEFT, _GAP, _TOP, _BOTTOM = 460, 420, 56, 30, 84, 60
_STYLE = (
    "text{font:12px system-ui,'DejaVu Sans',sans-serif;fill:#3a4048}.h{font-size:15px;font-weight:600;fill:#16191d}"
    ".g{stroke:#d9dde3}.r{text-anchor:end}.m{text-anchor:middle}.memplan{fill:#2f6fd8;stroke:#2f6fd8}"
    ".torch{fill:#c2571a;stroke:#c2571a}.planned{fill:#fff;stroke-width:2}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A step: its GB, its time relative to torch.compile, whose it is, and whether that was planned only."""

    gb: float
    time: float
    whose: str
    planned: bool
    name: str


def points_of(model: str, measured: Mapping[str, Any], predicted: Sequence[Mapping[str, Any]]) -> list[Point]:
    """Return the points of a model; eager, which takes more than twice the time, is left out."""
    found, ratio = [], dict[str, float]()
    for run in measured["runs"]:
        for row in (row for of in run["models"] if of["model"] == model for row in of["rows"] if "ratio" in row):
            base = row["contender"].partition("+")[0]
            if base != "eager":
                ratio[row["contender"]] = row["ratio"]
                whose = "torch" if base == "compile" else "memplan"
                found.append(
                    Point(gb=row["alloc"], time=row["ratio"], whose=whose, planned=False, name=row["contender"])
                )
    for row in predicted:
        if row["model"] == model and "ms" not in row:
            time = ratio[row["contender"].partition("+")[0]] * (1 + row["predicted"])
            found.append(Point(gb=row["gb"], time=time, whose="memplan", planned=True, name=row["contender"]))
    return found


def drawn(measured: Mapping[str, Any], predicted: Sequence[Mapping[str, Any]]) -> str:
    """Return the picture as an SVG file: a panel for each model."""
    width = len(MODELS) * (_LEFT + _WIDTH + _GAP)
    label = "GB against time on an H200: memplan and torch.compile"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{_HEIGHT}" viewBox="0 0 {width} {_HEIGHT}"'
        f' role="img" aria-label="{label}">',
        f'<style>{_STYLE}</style><rect width="{width}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="24" class="h">A training step on an H200: memory against time</text>',
    ]
    legend = (("memplan", "memplan, measured"), ("memplan planned", "memplan, planned"), ("torch", "torch, measured"))
    for k, (style, text) in enumerate(legend):
        parts.append(f'<circle cx="{_LEFT + 6 + 160 * k}" cy="42" r="5" class="{style}"/>')
        parts.append(f'<text x="{_LEFT + 18 + 160 * k}" y="46">{text}</text>')
    for k, (model, title) in enumerate(MODELS.items()):
        left = _LEFT + k * (_LEFT + _WIDTH + _GAP)
        parts += _panel(points_of(model, measured, predicted), title, left)
    return "\n".join((*parts, "</svg>")) + "\n"


def _panel(points: Sequence[Point], title: str, left: int) -> Iterator[str]:
    """Yield the elements of one model's panel: GB along x, time along y, points named on hover."""
    low, high = int(min(p.gb for p in points)), int(max(p.gb for p in points)) + 1
    least, most = int(10 * min(p.time for p in points)) / 10, (int(10 * max(p.time for p in points)) + 1) / 10
    bottom = _HEIGHT - _BOTTOM

    def x(gb: float) -> float:
        return left + _WIDTH * (gb - low) / (high - low)

    def y(time: float) -> float:
        return bottom - (bottom - _TOP) * (time - least) / (most - least)

    yield f'<text x="{left}" y="{_TOP - 10}" class="h">{title}</text>'
    for gb in range(low, high + 1):
        yield f'<path class="g" d="M{x(gb):.1f} {_TOP}V{bottom}"/>'
        yield f'<text x="{x(gb):.1f}" y="{bottom + 18}" class="m">{gb}</text>'
    for tenth in range(round(10 * least), round(10 * most) + 1):
        yield f'<path class="g" d="M{left} {y(tenth / 10):.1f}H{left + _WIDTH}"/>'
        yield f'<text x="{left - 8}" y="{y(tenth / 10) + 4:.1f}" class="r">{tenth / 10:.1f}</text>'
    axes = "GB with AdamW's state; upwards: time, relative to torch.compile's"
    yield f'<text x="{left + _WIDTH}" y="{bottom + 36}" class="r">{axes}</text>'
    for p in points:
        how = "planned" if p.planned else "measured"
        style = f"{p.whose} planned" if p.planned else p.whose
        yield f'<circle cx="{x(p.gb):.1f}" cy="{y(p.time):.1f}" r="5" class="{style}">'
        yield f"<title>{p.name}: {p.gb:.2f} GB, {p.time:.3f}, {how}</title></circle>"


def picture() -> str:
    """Return the picture of the results that are kept."""
    measured, predicted = (
        json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in ("gpu", "predicted")
    )
    return drawn(measured, predicted)


def main() -> int:
    """Write the picture."""
    PICTURE.write_text(picture(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
