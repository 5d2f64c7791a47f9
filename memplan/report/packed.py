"""Packs what a page draws: columns of numbers as deflated bytes, texts that repeat as indices into one list.

A page of 200,000 buffers stays below 5 MB. `page/data.js` unpacks it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from memplan.report.picture import GREY, OTHERS, Picture, colours

_DELTAS = frozenset({"start", "end", "gapStart", "gapEnd"})  # nearly sorted: their differences are small


class Words:
    """A list of texts, each once, and the index of each."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        """Return the index of `text`, which is added if it is new."""
        return self._index.setdefault(text, len(self._index))

    def all(self) -> list[str]:
        """Return the texts in the order of their indices."""
        return list(self._index)


def pack(columns: Mapping[str, Sequence[int]]) -> tuple[str, list[list[Any]]]:
    """Return columns of whole numbers below 2**63 as base64 text, and [name, length, bytes of each, is delta] of each.

    The bytes of a column are in planes, lowest first, so that they deflate well. A delta d is kept as 2d, or as -2d - 1
    if it is negative.
    """
    parts, described = [], []
    for name, numbers in columns.items():
        column = np.asarray(numbers, dtype=np.int64)
        delta = name in _DELTAS
        if delta:
            steps = np.diff(column, prepend=0)
            column = np.where(steps < 0, -2 * steps - 1, 2 * steps)
        width = max(1, (int(column.max(initial=0)).bit_length() + 7) // 8)
        planes = column.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width].T
        parts.append(planes.tobytes())
        described.append([name, len(column), width, int(delta)])
    return deflated(b"".join(parts)), described


def deflated(content: bytes) -> str:
    """Return bytes as base64 text of a zlib stream."""
    return base64.b64encode(zlib.compress(content)).decode("ascii")


def packed_picture(picture: Picture, links: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what a page needs to draw `picture`, as plain types.

    `links` are addresses by source line ("model.py:12"); lines without one are shown as text.
    """
    word, blocks = Words(), picture.blocks
    gaps = [list(zip(b.segments, b.segments[1:], strict=False)) for b in blocks]
    columns: dict[str, Sequence[int]] = {
        "offset": [b.offset for b in blocks],
        "size": [b.holder.size for b in blocks],
        "start": [b.segments[0].start for b in blocks],
        "end": [b.segments[-1].end for b in blocks],
        "gaps": [len(between) for between in gaps],
        "gapStart": [one.end for between in gaps for one, _ in between],
        "gapEnd": [two.start for between in gaps for _, two in between],
        "kind": [word(b.holder.kind) for b in blocks],
        "module": [word(b.holder.module) for b in blocks],
        "source": [word(b.holder.source) for b in blocks],
        "op": [word(b.holder.op) for b in blocks],
        "tensor": [word(b.tensor) for b in blocks],
        "opTarget": [word(op.target) for op in picture.ops],
        "opModule": [word(op.module) for op in picture.ops],
        "opBackward": [int(op.phase == "backward") for op in picture.ops],
    }
    packed, described = pack(columns)
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
        "palette": {"others": OTHERS, "rest": GREY},
        "words": word.all(),
        "links": _linked(word.all(), links or {}),
        "columns": described,
        "packed": packed,
        "texts": _texts(picture),
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
    return deflated(json.dumps({"ids": ids, "arrows": arrows}, separators=(",", ":"), allow_nan=False).encode())


def _linked(words: Iterable[str], links: Mapping[str, str]) -> dict[int, str]:
    return {i: links[text] for i, text in enumerate(words) if text in links}
