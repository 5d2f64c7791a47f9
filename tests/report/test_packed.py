"""The columns and texts that a page holds: unpacked by other code than the page's, they are those of the picture."""

from __future__ import annotations

import base64
import json
import zlib
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from memplan.core.plan import Plan
from memplan.report.pages import pack, page_data
from memplan.report.picture import picture_of_plan
from tests.graph_strategies import plans
from tests.samples import deep_plan


def unpacked(packed: str, columns: list[list[Any]]) -> dict[str, list[int]]:
    """Return the columns, read by the description in `pack`."""
    raw, at, found = zlib.decompress(base64.b64decode(packed)), 0, dict[str, list[int]]()
    for name, count, width, delta in columns:
        planes = [raw[at + plane * count : at + (plane + 1) * count] for plane in range(width)]
        numbers = [sum(plane[i] << 8 * k for k, plane in enumerate(planes)) for i in range(count)]
        at += width * count
        if delta:
            value = 0
            for i, d in enumerate(numbers):
                value += -(d + 1) // 2 if d % 2 else d // 2
                numbers[i] = value
        found[name] = numbers
    assert at == len(raw)
    return found


def texts(data: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(data["texts"])))
    return found


@given(st.lists(st.integers(0, 2**62)), st.lists(st.integers(0, 2**40)))
def test_columns_come_back(plain: list[int], steps: list[int]) -> None:
    assert unpacked(*pack({"size": plain, "start": steps})) == {"size": plain, "start": steps}


@given(plans())
def test_every_plan_comes_back_whole(plan: Plan) -> None:
    picture = picture_of_plan(plan)
    data = page_data(picture)
    columns, words = unpacked(data["packed"], data["columns"]), data["words"]
    assert texts(data)["ids"] == [b.holder.id for b in picture.blocks]
    gap = 0
    for i, b in enumerate(picture.blocks):
        count = columns["gaps"][i]
        gaps = list(zip(columns["gapStart"][gap : gap + count], columns["gapEnd"][gap : gap + count], strict=True))
        gap += count
        cuts = [columns["start"][i], *(step for pair in gaps for step in pair), columns["end"][i]]
        assert list(zip(cuts[::2], cuts[1::2], strict=True)) == [(s.start, s.end) for s in b.segments]
        assert (columns["offset"][i], columns["size"][i]) == (b.offset, b.holder.size)
        shown = [words[columns[name][i]] for name in ("kind", "module", "source", "op", "tensor")]
        assert shown == [b.holder.kind, b.holder.module, b.holder.source, b.holder.op, b.tensor]
    assert [words[k] for k in columns["opTarget"]] == [op.target for op in picture.ops]


def test_the_page_holds_every_arrow() -> None:
    picture = picture_of_plan(deep_plan("genoa"))
    data = page_data(picture)
    ids, arrows = texts(data)["ids"], texts(data)["arrows"]
    assert picture.arrows
    assert [(a[0], a[2], a[4], ids[a[6]], ids[a[7]]) for a in arrows] == [
        (a.start, a.end, 1, a.leaves, a.returns) for a in picture.arrows
    ]
