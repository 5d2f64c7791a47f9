"""The benchmark of the page: its pictures are plans that could be, and it measures what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.page import made_up, main
from memplan.core.problem import Buffer, Problem, Solution, Status
from memplan.core.validate import validate
from tests.report.browser import CHROMIUM, DRIVER, MISSING

pytestmark = pytest.mark.slow


def test_the_buffers_overlap_nowhere() -> None:
    picture = made_up(3000)
    assert len(picture.blocks) == 3000
    buffers = tuple(Buffer(id=b.holder.id, size=b.holder.size, live=b.segments[0]) for b in picture.blocks)
    problem = Problem(buffers=buffers)
    solution = Solution(
        offsets={b.holder.id: b.offset for b in picture.blocks},
        arena_size=picture.arena,
        status=Status.FEASIBLE,
        bound=picture.max_live,
        solver="made up",
        seconds=0.0,
    )
    validate(problem, solution)


@pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)
def test_the_command_line_writes_a_table(tmp_path: Path) -> None:
    assert main(["--counts", "200", "--repeats", "1", "--directory", str(tmp_path)]) == 0
    (row,) = json.loads((tmp_path / "page.json").read_text())["rows"]
    assert row["buffers"] == 200
    assert 0 < row["file_mb"] < 0.2
    assert 0 < row["after_ms"] < row["painted_ms"]
    assert row["redrawn_ms"] > 0
    assert row["hover_ms"] <= row["hover99_ms"]
