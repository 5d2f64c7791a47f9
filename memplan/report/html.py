"""Renders the picture of an arena as one self-contained HTML file: no network, no library, any browser."""

from __future__ import annotations

import json
from importlib import resources
from typing import Any

from memplan.report.picture import Picture, colours
from memplan.version import __version__


def picture_html(picture: Picture) -> str:
    """Return an HTML page. Its script draws `page_data`; its security policy forbids it to load anything."""
    page = resources.files("memplan.report").joinpath("page.html").read_text(encoding="utf-8")
    text = json.dumps(page_data(picture), separators=(",", ":"), allow_nan=False)
    # Names in a plan may contain any character: escape those that could end the script element.
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return page.replace("__DATA__", text)


def page_data(picture: Picture) -> dict[str, Any]:
    """Return the picture as plain types; texts of blocks and ops are indices into `words`, to keep the page small."""
    words: dict[str, int] = {}

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    blocks = [
        [
            b.holder.id,
            word(b.holder.kind),
            b.offset,
            b.holder.size,
            [[s.start, s.end] for s in b.segments],
            word(b.holder.module),
            word(b.holder.source),
            word(b.holder.op),
        ]
        for b in picture.blocks
    ]
    ops = [[word(op.target), int(op.phase == "backward"), word(op.module)] for op in picture.ops]
    return {
        "title": picture.title,
        "steps": picture.steps,
        "arena": picture.arena,
        "maxLive": picture.max_live,
        "peakStep": picture.peak_step,
        "backwardFrom": picture.backward_from,
        "figures": [list(figure) for figure in picture.figures],
        "notes": list(picture.notes),
        "colours": colours(picture),
        "profile": [list(point) for point in picture.profile],
        "blocks": blocks,
        "arrows": [
            [a.start, a.offset, a.end, a.back_offset, int(a.offload), a.about, a.leaves, a.returns]
            for a in picture.arrows
        ],
        "ops": ops,
        "words": list(words),
        "foot": f"memplan {__version__}. Everything in this file was computed before anything ran.",
    }
