"""Renders the comparison of two plans as one self-contained HTML page: both arenas side by side, zoomed together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from memplan.analysis.diff import Diff, diff, matched
from memplan.analysis.holders import largest
from memplan.core.plan import Plan
from memplan.report.diff_form import diff_sections, diff_title
from memplan.report.packed import pack, packed_picture
from memplan.report.page_parts import FOOT, page
from memplan.report.picture import Picture, picture_of_plan


def diff_html(before: Plan, after: Plan, *, links: Mapping[str, str] | None = None) -> str:
    """Return an HTML page with both plans, and what came, went, grew, shrank or moved to the peak, by module.

    `links` are addresses by source line ("model.py:12").
    """
    return page("diff", diff_data(before, after, links))


def diff_data(before: Plan, after: Plan, links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what the page of two plans shows, as plain types.

    `pairs` are packed columns (see `pack`) of the indices of matching buffers in the two pictures.
    """
    found, pictures = diff(before, after), (picture_of_plan(before), picture_of_plan(after))
    pairs = list(_pairs(before, after, pictures))
    packed, columns = pack({"before": [one for one, _ in pairs], "after": [two for _, two in pairs]})
    return {
        "title": diff_title(found),
        "names": _names(found),
        "totals": next(diff_sections(found)).rows,
        "graphs": next(diff_sections(found)).lines,
        "plans": [packed_picture(picture, links) for picture in pictures],
        "pairs": packed,
        "columns": columns,
        "foot": FOOT,
    }


def _names(found: Diff) -> list[str]:
    one, two = (name or "plan" for name in found.names)
    return [f"before: {one}", f"after: {two}"]


def _pairs(before: Plan, after: Plan, pictures: tuple[Picture, Picture]) -> Iterator[tuple[int, int]]:
    """Yield the indices of each two buffers that match, where both are drawn; buffers without bytes are not."""
    places = [{b.holder.id: i for i, b in enumerate(picture.blocks)} for picture in pictures]
    for one, two in matched(largest(before), largest(after))[0]:
        if one.id in places[0] and two.id in places[1]:
            yield places[0][one.id], places[1][two.id]
