"""`memplan solve`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.instances import planted
from tests.cli.helpers import CSV, Run, write_buffers


def test_solve_prints_the_figures(run: Run, csv_file: Path) -> None:
    code, out, err = run("solve", csv_file)
    assert (code, err) == (0, "")
    for label in ("buffers", "max live", "arena", "fragmentation", "optimal", "solver", "seconds"):
        assert label in out
    assert "48 B" in out


@pytest.mark.parametrize("solver", ["auto", "greedy", "naive", "partition"])
def test_solve_as_json_with_every_solver(run: Run, csv_file: Path, solver: str) -> None:
    code, out, _ = run("solve", csv_file, "--solver", solver, "--json", "--seed", 3, "--time-limit", 5)
    data = json.loads(out)
    assert code == 0
    assert data["max_live"] == 48
    assert data["arena_size"] >= 48
    assert sorted(data["offsets"]) == ["a", "b", "c"]
    assert data["fragmentation"] == pytest.approx(1 - 48 / data["arena_size"])


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_solve_exits_1_when_nothing_fits(run: Run, csv_file: Path, tmp_path: Path, form: list[str]) -> None:
    code, out, err = run("solve", csv_file, "--capacity", "40", "-o", tmp_path / "out.csv", *form)
    assert code == 1
    assert re.search("infeasible|unknown", out)
    assert "out.csv was not written" in err
    assert not (tmp_path / "out.csv").exists()


def test_solve_takes_the_capacity_from_the_files_name(run: Run, tmp_path: Path) -> None:
    (tmp_path / "x.40.csv").write_text(CSV)
    assert run("solve", "x.40.csv")[0] == 1
    assert run("solve", "x.40.csv", "--capacity", "1KiB")[0] == 0


@pytest.fixture
def hard_file(tmp_path: Path) -> Path:
    """60 buffers that no heuristic places within 1 KiB, and a search does; there is room for 4 KiB."""
    path, problem = tmp_path / "hard.4096.csv", planted(60, seed=3)
    write_buffers(path, problem)
    return path


def test_solve_goes_on_to_the_smallest_arena_when_asked(run: Run, hard_file: Path) -> None:
    first = json.loads(run("solve", hard_file, "--json", "--quiet")[1])
    least = json.loads(run("solve", hard_file, "--json", "--quiet", "--minimize")[1])
    assert first["max_live"] < first["arena_size"] <= first["capacity"] == least["capacity"] == 4096
    assert (least["arena_size"], least["status"]) == (1024, "optimal")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", ":1"),
        ("id,lower,upper,size\na,0,1,5\nb,3,1,5\n", ":3"),
        ("id,lower,upper,size\na,0,1,5\na,0,1,5\n", "'a'"),
        ("id,lower,upper,size,gaps\na,0,1,5,\nb,0,9,5,1-\n", ":3: gaps"),
        ("\x00\x01\x02", "buffers.csv"),
        (b"\xff\xfe\x00\xd8", "buffers.csv"),
    ],
)
def test_a_bad_csv_is_bad_input(run: Run, tmp_path: Path, content: str | bytes, message: str) -> None:
    (tmp_path / "buffers.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    code, out, err = run("solve", "buffers.csv", "-o", "out.csv")
    assert (code, out) == (2, "")
    assert "buffers.csv" in err
    assert message in err
    assert [p.name for p in tmp_path.iterdir()] == ["buffers.csv"]
