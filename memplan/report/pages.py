"""Makes self-contained HTML pages: of an arena, of two plans, of a frontier. No network, no library, any browser.

A page is put together from its files in `page/`, with its data: columns of numbers as deflated bytes, texts that repeat
as indices into one list. A page of 200,000 buffers stays below 5 MB. `page/data.js` unpacks it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from memplan.analysis.buffers import largest
from memplan.analysis.diff import diff, matched
from memplan.core.evictions import Action
from memplan.core.plan import Plan
from memplan.core.units import format_bytes
from memplan.report.forms import diff_form, share_of
from memplan.report.picture import GREY, OTHERS, Picture, colours, picture_of_plan
from memplan.report.sections import Form, percent
from memplan.version import __version__

if TYPE_CHECKING:
    from memplan.planning.frontier import Frontier

FOOT = f"memplan {__version__}. Everything in this file was computed before anything ran."

_FAILED = """function failed(error) {
  document.getElementById("verdict").textContent = `Not drawn, which takes a browser of 2023 or later: ${error}`;
  throw error;
}
"""
_SHARED = ("format", "data", "look", "theme", "view", "paint", "arena", "pins", "permalink")
_REPORT = ("tree", "table", "report")
_SCRIPTS = {  # of each page, in the order in which they run
    "report": (*_SHARED, *_REPORT, "start_report"),
    "budget": (*_SHARED, *_REPORT, "start_budget"),
    "diff": (*_SHARED, "compare", "start_diff"),
}
_DELTAS = frozenset({"start", "end", "gapStart", "gapEnd"})  # nearly sorted: their differences are small


def picture_html(picture: Picture) -> str:
    """Return the page of an arena."""
    return _page("report", page_data(picture))


def diff_html(before: Plan, after: Plan) -> str:
    """Return the page of two plans: both arenas zoomed together, and what changed, by module."""
    return _page("diff", _diff_data(before, after))


def frontier_html(form: Form, frontier: Frontier, pictures: Sequence[Picture | None] = ()) -> str:
    """Return the page of a frontier: the curve, every figure in a table, and the plans that the points open.

    `pictures` are those of the plan of each point, None where there is none; points whose plan is the same have the
    same object.
    """
    return _page("budget", frontier_data(form, frontier, pictures))


def _page(name: str, data: Mapping[str, Any]) -> str:
    """Return the page `name` that shows `data`. Its policy lets its script run, and forbids any other and any request.

    Characters of names that could end the element of the data are escaped.
    """
    body = _file(f"{name}.html")
    if name == "budget":  # a point of it opens the plan
        body = body.replace("__REPORT__", _file("report.html"))
    scripts = "\n".join(_file(f"{part}.js") for part in _SCRIPTS[name])
    script = (
        '"use strict";\n(async () => {\nconst data = JSON.parse(document.getElementById("data").textContent);\n'
        f"{scripts}\n}})().catch(failed);\n{_FAILED}"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    parts = {"__HASH__": f"sha256-{digest}", "__STYLE__": _file("page.css"), "__BODY__": body, "__SCRIPT__": script}
    text, embedded = _file("shell.html"), json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark, part in parts.items():
        text = text.replace(mark, part)
    for mark in "<>&\u2028\u2029":
        embedded = embedded.replace(mark, f"\\u{ord(mark):04x}")
    return text.replace("__DATA__", embedded)


def _file(name: str) -> str:
    return resources.files("memplan.report").joinpath("page", name).read_text(encoding="utf-8")


def _diff_data(before: Plan, after: Plan) -> dict[str, Any]:
    found = diff(before, after)
    form, pictures = diff_form(found), (picture_of_plan(before), picture_of_plan(after))
    places = [{b.holder.id: i for i, b in enumerate(picture.blocks)} for picture in pictures]
    pairs = [(places[0].get(a.id), places[1].get(b.id)) for a, b in matched(largest(before), largest(after))[0]]
    drawn = [(a, b) for a, b in pairs if a is not None and b is not None]  # buffers without bytes are not
    packed, columns = pack({"before": [a for a, _ in drawn], "after": [b for _, b in drawn]})
    names = [f"{side}: {name or 'plan'}" for side, name in zip(("before", "after"), found.names, strict=True)]
    return {
        **{"title": form.title, "names": names, "totals": form.sections[0].rows, "answer": form.sections[0].lines},
        "plans": [_packed(picture) for picture in pictures],
        **{"pairs": packed, "columns": columns, "foot": FOOT},
    }


def frontier_data(form: Form, frontier: Frontier, pictures: Sequence[Picture | None] = ()) -> dict[str, Any]:
    """Return what the page of a frontier shows, as plain types; sizes are bytes, overheads shares of the time."""
    kept = {id(picture): picture for picture in pictures if picture is not None}
    plans = {key: k for k, key in enumerate(kept)}
    opened = [None if picture is None else plans[id(picture)] for picture in pictures]
    opened += [None] * (len(frontier.points) - len(opened))
    points = list[dict[str, Any]]()
    for row, (p, plan) in enumerate(zip(frontier.points, opened, strict=True)):
        if p.plan is not None:
            again, copied = p.evicted(Action.RECOMPUTE), p.evicted(Action.OFFLOAD)
            about = [
                f"{format_bytes(p.total)}, {percent(p.overhead)}",
                f"budget {format_bytes(p.budget)}, {share_of(p.budget, frontier.eager)} of the eager total",
                f"{format_bytes(again)} computed again" if again else "",
                f"{format_bytes(copied)} copied to the host and back" if copied else "",
            ]
            points.append({"total": p.total, "overhead": p.overhead, "plan": plan, "row": row, "about": about})
    return {
        **{"title": form.title, "policy": frontier.policy, "eager": frontier.eager, "foot": FOOT},
        "answer": form.sections[0].lines,
        "top": max([0.01, *(point["overhead"] for point in points)]) * 1.08,
        "right": max(frontier.eager, frontier.most, 1) * 1.04,
        **{"points": points, "rows": opened},
        "sections": [
            {
                **{"heading": s.heading, "lines": s.lines, "rows": s.rows},
                "columns": [[c.name, c.numeric] for c in s.columns],
            }
            for s in form.sections
        ],
        "plans": [_packed(picture) for picture in kept.values()],
    }


def page_data(picture: Picture) -> dict[str, Any]:
    """Return what the page of an arena shows, as plain types."""
    return {**_packed(picture), "foot": FOOT}


def _packed(picture: Picture) -> dict[str, Any]:
    """Return what a page needs to draw `picture`, as plain types."""
    words, blocks = dict[str, int](), picture.blocks
    gaps = [list(pairwise(b.segments)) for b in blocks]

    def word(text: str) -> int:
        return words.setdefault(text, len(words))

    columns: dict[str, Sequence[int]] = {
        "offset": [b.offset for b in blocks],
        "size": [b.holder.size for b in blocks],
        "start": [b.segments[0].start for b in blocks],
        "end": [b.segments[-1].end for b in blocks],
        "gaps": [len(between) for between in gaps],
        "gapStart": [one.end for between in gaps for one, _ in between],
        "gapEnd": [two.start for between in gaps for _, two in between],
        **{name: [word(getattr(b.holder, name)) for b in blocks] for name in ("kind", "module", "source", "op")},
        "tensor": [word(b.tensor) for b in blocks],
        "opTarget": [word(op.target) for op in picture.ops],
        "opModule": [word(op.module) for op in picture.ops],
        "opBackward": [int(op.phase == "backward") for op in picture.ops],
    }
    packed, described = pack(columns)
    return {
        **{"title": picture.title, "steps": picture.steps, "arena": picture.arena, "maxLive": picture.max_live},
        **{"peakStep": picture.peak_step, "backwardFrom": picture.backward_from},
        **{"figures": [list(figure) for figure in picture.figures]},
        **{"answer": list(picture.answer), "notes": list(picture.notes), "proofs": list(picture.proofs)},
        **{"colours": colours(picture), "palette": {"others": OTHERS, "rest": GREY}},
        "words": list(words),
        **{"columns": described, "packed": packed, "texts": _texts(picture)},
    }


def _texts(picture: Picture) -> str:
    """Return the names of the blocks, and the evictions with the indices of their blocks, packed."""
    ids = [b.holder.id for b in picture.blocks]
    index = {name: i for i, name in enumerate(ids)}
    arrows = [
        [a.start, a.offset, a.end, a.back_offset, int(a.offload), a.about, index[a.leaves], index[a.returns]]
        for a in picture.arrows
        if a.leaves in index and a.returns in index
    ]
    return _deflated(json.dumps({"ids": ids, "arrows": arrows}, separators=(",", ":"), allow_nan=False).encode())


def pack(columns: Mapping[str, Sequence[int]]) -> tuple[str, list[list[Any]]]:
    """Return columns of whole numbers below 2**63 as base64 text, and [name, length, bytes of each, is delta] of each.

    The bytes of a column are in planes, lowest first, so that they deflate well. A delta d is kept as 2d, or as -2d - 1
    if it is negative.
    """
    parts, described = [], []
    for name, numbers in columns.items():
        column = np.asarray(numbers, dtype=np.int64)
        if name in _DELTAS:
            steps = np.diff(column, prepend=0)
            column = np.where(steps < 0, -2 * steps - 1, 2 * steps)
        width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
        parts.append(column.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T.tobytes())
        described.append([name, len(column), width, int(name in _DELTAS)])
    return _deflated(b"".join(parts)), described


def _deflated(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode("ascii")
