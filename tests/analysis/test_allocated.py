"""Snapshots of CUDA's allocator beside plans, and files that are none."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from memplan.analysis.allocated import read_snapshot
from memplan.errors import UnreadableFile
from memplan.report.memory_viz import snapshot_bytes
from memplan.report.picture import picture_of_plan
from tests.samples import sample_plan

LINE = [{"name": "forward", "filename": "/home/me/model.py", "line": 7}]
INSIDE = [
    {"name": "at::empty", "filename": "??", "line": 0},
    {"name": "linear", "filename": "/x/site-packages/torch/nn/functional.py", "line": 3},
    *LINE,
]


def event(action: str, addr: int, size: int, frames: Any = ()) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "frames": list(frames), "time_us": 1}


def segment(*blocks: tuple[int, str], device: int = 0) -> dict[str, Any]:
    made = [{"size": size, "requested_size": size, "state": state, "frames": LINE} for size, state in blocks]
    total = sum(size for size, _ in blocks)
    return {"device": device, "address": 0, "total_size": total, "allocated_size": 0, "blocks": made}


def write(path: Path, data: Any) -> Path:
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return path


def test_the_peak_is_replayed_from_what_was_alive_before(tmp_path: Path) -> None:
    """64 bytes are there throughout, 32 are freed first; 16 and 8 come, 16 goes, 100 come and go, 8 stay."""
    events = [
        event("free_requested", 64, 32), event("free_completed", 64, 32), event("segment_alloc", 0, 1 << 20),
        event("alloc", 128, 16, INSIDE), event("alloc", 64, 8, INSIDE), event("free_requested", 128, 16),
        event("alloc", 256, 100, LINE), event("free_requested", 256, 100), event("oom", 0, 5),
    ]  # fmt: skip
    data = {"segments": [segment((64, "active_allocated"), (8, "active_allocated"), (40, "inactive"))]}
    found = read_snapshot(write(tmp_path / "s.pickle", {**data, "device_traces": [events]}))
    assert (found.device, found.peak, found.reserved, found.events) == (0, 64 + 8 + 100, 112, 6)
    assert found.lines == {"model.py:7": 172}
    plain = read_snapshot(write(tmp_path / "p.pickle", {**data, "device_traces": [[]]}))
    assert (plain.peak, plain.events) == (72, 0)
    two = {"segments": [*data["segments"], segment((500, "active_allocated"), device=1)], "device_traces": []}
    assert (read_snapshot(write(tmp_path / "t.pickle", two)).device, plain.device) == (1, 0)


def test_our_own_snapshot_shows_the_plans_peak(tmp_path: Path) -> None:
    plan = sample_plan()
    found = read_snapshot(write(tmp_path / "own.pickle", snapshot_bytes(picture_of_plan(plan))))
    assert found.peak == plan.max_live
    assert found.reserved == plan.arena_size
    assert sum(found.lines.values()) == plan.max_live


class Hostile:
    def __reduce__(self) -> Any:
        return os.system, ("touch hacked",)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (Hostile(), "system"),
        ({"segments": [], "device_traces": [[Hostile()]]}, "system"),
        (Path("x"), "plain data only"),
        (b"", "is no snapshot"),
        (b"\x80\x04\x95", "is no snapshot"),
        (b"cos\nsystem\n(S'touch hacked'\ntR.", "system"),
        (b"\x80\x02\x82\x01.", "is no snapshot"),
        (b"Pname\n.", "outside of the file"),
        ([1, 2], "is no snapshot"),
        ({"a": [1]}, "it has no 'segments'"),
        ({"segments": []}, "no segment and no event"),
        ({"segments": [segment((-8, "active_allocated"))]}, "no number of bytes"),
        ({"segments": [segment((True, "inactive"))]}, "no number of bytes"),
        ({"segments": [{"device": 0, "blocks": 3, "total_size": 1}]}, "is no snapshot"),
        ({"segments": [], "device_traces": [[event("alloc", 1, 2, [{"filename": "a.py"}])]]}, "line"),
        ({"segments": [], "device_traces": [[{"action": "alloc"}]]}, "addr"),
    ],
)
def test_what_is_no_snapshot_is_refused_and_nothing_of_it_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: Any, what: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write(tmp_path / "bad.pickle", data)
    with pytest.raises(UnreadableFile, match=what):
        read_snapshot(path)
    assert not (tmp_path / "hacked").exists()
