"""Renders the picture of an arena as one self-contained HTML file: no network, no library, any browser."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from memplan.report.packed import packed_picture
from memplan.report.page_parts import FOOT, page
from memplan.report.picture import Picture


def picture_html(picture: Picture, *, links: Mapping[str, str] | None = None) -> str:
    """Return an HTML page. Its script draws `page_data`; its security policy forbids it to load anything.

    `links` are addresses by source line ("model.py:12"), such as those of `source_links`.
    """
    return page("report", page_data(picture, links))


def page_data(picture: Picture, links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the picture as plain types, with columns packed (see `packed_picture`)."""
    return {**packed_picture(picture, links), "foot": FOOT}
