"""SVG and allocator snapshots: complete, well-formed, and what their viewers expect."""

from __future__ import annotations

import io
import pickle
import pickletools
import xml.etree.ElementTree as ET
from typing import Any

import pytest
from hypothesis import given

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.report.memory_viz import snapshot, snapshot_bytes
from memplan.report.pages import picture_html
from memplan.report.picture import Picture, picture_of, picture_of_plan
from memplan.report.svg import picture_svg
from memplan.solvers import solve
from tests.graph_strategies import plans
from tests.samples import deep_plan, sample_plan

SVG = "{http://www.w3.org/2000/svg}"


def _evicted() -> Picture:
    """One buffer that is away during [2, 6) and returns to its place."""
    buffers = (
        Buffer(id="a<&\x00>", size=64, live=Interval(0, 9), gaps=(Interval(2, 6),), kind="activation"),
        Buffer(id="b", size=32, live=Interval(2, 6), kind="other"),
    )
    problem = Problem(buffers=buffers)
    return picture_of(problem, solve(problem, solver="naive"), "x.csv")


@given(plans())
def test_every_picture_exists_for_every_plan(plan: Plan) -> None:
    picture = picture_of_plan(plan)
    assert len(picture.blocks) == len(plan.problem.buffers)
    root = ET.fromstring(picture_svg(picture))
    titles = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert len(titles) == len(picture.blocks)
    assert "__DATA__" not in picture_html(picture)
    assert pickle.loads(snapshot_bytes(picture)) == snapshot(picture)


def test_svg_blocks_carry_their_origin_and_lie_within_the_arena() -> None:
    root = ET.fromstring(picture_svg(picture_of_plan(sample_plan())))
    texts = [t.text or "" for t in root.iter(f"{SVG}title")]
    assert any("activation_2\n128 B at offset" in t and "h.0.attn, model.py:12, aten.mm" in t for t in texts)
    blocks = [r for g in root.iter(f"{SVG}g") for r in g.iter(f"{SVG}rect")]
    assert len(blocks) == 3
    for r in blocks:
        x, y, wide, tall = (float(r.attrib[k]) for k in ("x", "y", "width", "height"))
        assert x >= 91.99
        assert x + wide <= 1256.01
        assert y >= 83.99
        assert y + tall <= 554.01


def test_an_eviction_is_two_blocks_and_a_line() -> None:
    picture = _evicted()
    root = ET.fromstring(picture_svg(picture))
    first = next(root.iter(f"{SVG}g"))
    assert len(list(first.iter(f"{SVG}rect"))) == 2
    assert len(list(first.iter(f"{SVG}path"))) == 1
    actions = [e["action"] for e in snapshot(picture)["device_traces"][0]]
    assert actions.count("alloc") == actions.count("free_completed") == 3


@pytest.mark.parametrize("policy", ["recompute", "genoa"])
def test_every_eviction_of_a_plan_is_an_arrow_between_its_blocks(policy: str) -> None:
    plan = deep_plan(policy)
    picture = picture_of_plan(plan)
    assert len(picture.arrows) == len(plan.evictions) > 1
    blocks = {b.holder.id: b for b in picture.blocks}
    for arrow, eviction in zip(picture.arrows, plan.evictions, strict=True):
        gone, back = blocks[arrow.leaves], blocks[arrow.returns]
        assert back.holder.id == eviction.instance
        assert gone.holder.start < arrow.start == gone.holder.end <= arrow.end == back.holder.start
        assert arrow.offset == gone.offset + gone.holder.size // 2
        assert arrow.back_offset == back.offset + back.holder.size // 2
        assert arrow.offload == (policy == "genoa")
        assert eviction.storage in arrow.about
    root = ET.fromstring(picture_svg(picture))
    drawn = [p for p in root.iter(f"{SVG}path") if p.attrib.get("class") == "e"]
    assert [p[0].text for p in drawn] == [arrow.about for arrow in picture.arrows]
    assert all(("stroke-dasharray" in p.attrib) == (policy == "recompute") for p in drawn)
    assert {figure[0] for figure in picture.figures} >= {"arena budget", "arena", "total"}


@given(plans())
def test_the_snapshot_replays_to_max_live_without_overlap(plan: Plan) -> None:
    live: dict[int, int] = {}
    most = 0
    for event in snapshot(picture_of_plan(plan))["device_traces"][0][1:]:
        if event["action"] == "alloc":
            low, high = event["addr"], event["addr"] + event["size"]
            assert all(high <= a or a + s <= low for a, s in live.items())
            live[low] = event["size"]
            most = max(most, sum(live.values()))
        elif event["action"] == "free_requested":
            assert live.pop(event["addr"]) == event["size"]
    assert not live
    assert most == plan.max_live


def test_the_snapshot_is_plain_data_of_protocol_4() -> None:
    data = snapshot_bytes(picture_of_plan(sample_plan()))
    assert data[:2] == b"\x80\x04"
    names = {opcode.name for opcode, _, _ in pickletools.genops(io.BytesIO(data))}
    assert not names & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ"}


def test_torchs_own_viewer_replays_the_snapshot() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    data: dict[str, Any] = snapshot(picture_of_plan(sample_plan()))
    text = viewer.trace(data)
    assert text.count("= a[") == 3
    assert "segments: 1" in viewer.segsum(data)
