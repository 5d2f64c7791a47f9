"""Renders a `Frontier` as one self-contained HTML page, on which a point opens its plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memplan.core.units import format_bytes, format_share
from memplan.planning.frontier import Frontier, Rival
from memplan.report.frontier_form import Plot, frontier_sections, frontier_title
from memplan.report.packed import packed_picture
from memplan.report.page_parts import FOOT, page
from memplan.report.picture import Picture
from memplan.report.sections import Section


def frontier_html(
    name: str,
    frontier: Frontier,
    rivals: Sequence[Rival] = (),
    pictures: Sequence[Picture | None] = (),
    *,
    links: Mapping[str, str] | None = None,
) -> str:
    """Return an HTML page: the curve, every figure in tables, and the plans that the points open.

    `pictures` are those of the plan of each point, None where there is none; points whose plan is the same have the
    same object. `links` are addresses by source line.
    """
    return page("budget", frontier_data(name, frontier, rivals, pictures, links))


def frontier_data(
    name: str,
    frontier: Frontier,
    rivals: Sequence[Rival] = (),
    pictures: Sequence[Picture | None] = (),
    links: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return what the page of a frontier shows, as plain types; sizes are bytes, overheads shares of the time."""
    plot = Plot(frontier, rivals)
    kept = {id(picture): picture for picture in pictures if picture is not None}
    plans = {key: k for k, key in enumerate(kept)}
    opened = [None if picture is None else plans[id(picture)] for picture in pictures]
    opened += [None] * (len(frontier.points) - len(opened))
    first, *others = frontier_sections(frontier, rivals)
    points = [
        {
            "total": p.total,
            "overhead": frontier.overhead(p),
            "plan": plan,
            "row": row,
            "about": [
                f"{format_bytes(p.total)}: +{frontier.overhead(p) * 100:.2f} %",
                f"budget {format_bytes(p.budget)}, {format_share(p.budget / frontier.eager)} of the eager total",
                f"{format_bytes(p.recomputed)} computed again" if p.recomputed else "",
                f"{format_bytes(p.offloaded)} copied to the host and back" if p.offloaded else "",
            ],
        }
        for row, (p, plan) in enumerate(zip(frontier.points, opened, strict=True))
        if p.total is not None and p.seconds is not None
    ]
    return {
        "title": frontier_title(name, frontier),
        "policy": frontier.policy,
        "eager": frontier.eager,
        "top": plot.top,
        "right": plot.right,
        "points": points,
        "rivals": [
            {
                "total": r.total,
                "overhead": r.overhead,
                "about": [f"torch at {r.name}: {format_bytes(r.total)}, +{r.overhead * 100:.2f} %"],
            }
            for r in rivals
        ],
        "sections": [_section(section) for section in (first, *others)],
        "rows": opened,
        "plans": [packed_picture(picture, links) for picture in kept.values()],
        "foot": FOOT,
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "heading": section.heading,
        "lines": section.lines,
        "columns": [[column.name, column.numeric] for column in section.columns],
        "rows": section.rows,
    }
