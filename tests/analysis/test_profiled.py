"""What torch's profiler recorded of memory beside plans, and files that are none of its."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import memplan
from memplan.analysis import profiled
from memplan.analysis.profiled import functions_of, is_profile, read_profile
from memplan.errors import UnreadableFile
from memplan.report.allocated_form import by_kind, by_line
from tests.samples import sample_plan


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 8)

    def hidden(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(self.up(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.hidden(x))
        return out


HIDDEN = f"test_profiled.py:{_Net.hidden.__code__.co_firstlineno}"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the four files of one step that torch wrote, and the step's plan."""
    folder, model, x = tmp_path_factory.mktemp("recorded"), _Net(), torch.randn(512, 64)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, record_shapes=True, with_stack=True
    ) as recording:
        step()
    for name in ("t.json", "t.json.gz", "t.raw.json.gz"):
        with pytest.warns(FutureWarning, match="deprecated"):
            recording.export_memory_timeline(str(folder / name), device="cpu")
    recording.export_chrome_trace(str(folder / "trace.json"))
    memplan.plan(model, x).save(folder / "plan.json")
    return folder


def test_timelines_of_torch_show_the_peak_by_kind(recorded: Path) -> None:
    plan = memplan.load(recorded / "plan.json")
    found = [read_profile(recorded / name) for name in ("t.json", "t.json.gz", "t.raw.json.gz")]
    assert all(is_profile(recorded / name) for name in ("t.json", "t.json.gz", "t.raw.json.gz", "trace.json"))
    assert len({one.peak for one in found}) == 1
    for one in found:
        assert sum(one.kinds.values()) == one.peak
        rows = {kind: (was, planned) for kind, was, planned in by_kind(one, plan)}
        parameters = sum(p.nbytes for p in _Net().parameters())
        assert rows["parameters"] == (parameters, parameters)
        assert rows["inputs"] == (512 * 64 * 4,) * 2
        assert rows["optimizer state"] == (2 * parameters + 4 * 4, 0)
        assert sum(was for was, _ in rows.values()) == one.peak
        assert sum(planned for _, planned in rows.values()) == plan.total


def test_a_trace_of_torch_shows_the_functions_that_allocated(recorded: Path) -> None:
    plan = memplan.load(recorded / "plan.json")
    found = read_profile(recorded / "trace.json")
    assert found.by_source()[HIDDEN] == 2 * 512 * 256 * 4  # before and after gelu
    rows = {source: (was, planned) for source, was, planned in by_line(found, plan)}
    assert rows[HIDDEN] == (2 * 512 * 256 * 4,) * 2  # though a plan's sources are lines within the function
    assert sum(was for was, _ in rows.values()) == found.peak


def test_lines_belong_to_the_last_function_that_begins_before_them() -> None:
    lines = ("a.py:12", "a.py:3", "b.py:12", "", "a.py:x")
    assert list(functions_of(lines, ("a.py:5", "a.py:10"))) == ["a.py:10", "a.py:3", "b.py:12", "", "a.py:x"]


def memory(ts: float, addr: int, size: int, total: int, device: tuple[int, int] = (1, 0)) -> dict[str, Any]:
    args = {"Addr": addr, "Bytes": size, "Total Allocated": total, "Total Reserved": 4096}
    where = {"Device Type": device[0], "Device Id": device[1]}
    return {"name": "[memory]", "ph": "i", "pid": 1, "tid": 1, "ts": ts, "args": {**args, **where}}


def running(name: str, ts: float, dur: float, cat: str = "python_function") -> dict[str, Any]:
    return {"name": name, "ph": "X", "cat": cat, "pid": 1, "tid": 1, "ts": ts, "dur": dur}


def test_a_trace_of_an_accelerator_knows_what_was_there_before(tmp_path: Path) -> None:
    """1000 bytes are there, 200 of them are freed; the CPU's events are not the accelerator's."""
    events = [
        running("me/model.py(7): forward", 0, 10), running("torch/nn/modules/linear.py(1): forward", 1, 8),
        running("<built-in function linear>", 1, 8), running("aten::linear", 20, 10, "cpu_op"),
        running("aten::addmm", 21, 5, "cpu_op"), running("typing.py(3): cast", 40, 5),
        memory(2, 64, 100, 1100), memory(22, 128, 300, 1400), memory(30.5, 192, 50, 1450), memory(31, 512, -200, 1250),
        memory(42, 256, 100, 1350), memory(3, 64, 1 << 20, 1 << 20, (0, -1)), memory(3, 64, 60, 60, (1, 1)),
    ]  # fmt: skip
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*events, 3]}))
    found = read_profile(path)
    assert (found.device, found.peak, found.reserved, found.events) == (0, 1450, 4096, 5)
    assert found.by_source() == {"": 1050, "aten::linear": 300, "model.py:7": 100}
    assert found.functions == ("model.py:7",)
    path.write_text(json.dumps({"traceEvents": [memory(3, 64, 1 << 20, 1 << 20, (0, -1))]}))
    assert (read_profile(path).device, read_profile(path).peak) == (None, 1 << 20)


def test_what_is_a_plan_is_not_taken_for_a_profile(tmp_path: Path) -> None:
    sample_plan().save(tmp_path / "plan.json")
    (tmp_path / "other.json").write_text("{}")
    (tmp_path / "list.json").write_text("[]")
    for name in ("plan.json", "other.json", "list.json", "none.json", "model.py:net"):
        assert not is_profile(tmp_path / name), name


ROW = [0, 1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"", "is not JSON"),
        (b"[[1", "is not JSON"),
        (b"\xff\xfe[", "is not JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"[[" + b"9" * 5000 + b", 1, 2, 3]]", "is not JSON"),
        (b"\x1f\x8bnothing", "damaged gzip file"),
        (gzip.compress(json.dumps([[1], [ROW]]).encode(), mtime=0)[:-4], "damaged gzip file"),
        (3, "is no recording"),
        ("text", "is no recording"),
        ([], "no event"),
        ([[1, 2], [ROW]], "2 times and 1 rows"),
        ([[1], [[0, 1]]], "8 categories"),
        ([[1], [[5, *ROW[1:]]]], "8 categories"),
        ([[1], [[0, 1.5, *ROW[2:]]]], "no number of bytes"),
        ([[1], [[0, True, *ROW[2:]]]], "no number of bytes"),
        ([[1], [[0, -100, *ROW[2:]]]], "no number of bytes"),
        ([[1, 2, 3, 4], [5, 9, 10, 0]], "no action"),
        ([[1, 2, 3, 4], [5, 1, 10, 99]], "index out of range"),
        ([[1, 2, 3, 4], [5, 1, 10, -1]], "no number of bytes"),
        ([[-1, 1, 10, 0], {}], "an event has"),
        ({}, "traceEvents"),
        ({"traceEvents": []}, "no event of memory"),
        ({"traceEvents": 5}, "is no recording"),
        ({"traceEvents": [{"name": "[memory]"}]}, "args"),
        ({"traceEvents": [{**memory(1, 2, 3, 4), "ts": "soon"}]}, "no time"),
        ({"traceEvents": [{**memory(1, 2, 3, 4), "ts": float("nan")}]}, "no time"),
        ({"traceEvents": [memory(1, -2, 3, 4)]}, "no number of bytes"),
        ({"traceEvents": [memory(1, 2, 3.5, 4)]}, "no number of bytes"),  # type: ignore[arg-type]
        ({"traceEvents": [memory(1, 2, 3, 4), {**running("f", 1, 2), "dur": None}]}, "no time"),
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, data: Any, what: str) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(UnreadableFile, match=what) as caught:
        read_profile(path)
    assert caught.value.hint


def test_a_file_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiled, "_MOST", 1 << 16)
    path = tmp_path / "bomb.json.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * (1 << 24)))
    with pytest.raises(UnreadableFile, match=r"more than 64\.00 KiB"):
        read_profile(path)
    with pytest.raises(UnreadableFile, match="cannot be read"):
        read_profile(tmp_path / "none.json.gz")
