"""CSV in and out, in minimalloc's format."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from memplan.csvio import read_problem, write_solution
from memplan.errors import InvalidSolution, UnreadableFile
from memplan.problem import Buffer, Interval, Problem, Solution, Status
from memplan.solve import solve
from tests.strategies import problems


def test_reads_the_capacity_from_the_name_and_the_columns_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "x.4096.csv"
    path.write_text("size,id,upper,lower,alignment\n10,a,5,1,64\n\n20,b,3,0,1\n")
    assert read_problem(path) == Problem(
        buffers=(
            Buffer(id="a", size=10, live=Interval(1, 5), alignment=64),
            Buffer(id="b", size=20, live=Interval(0, 3)),
        ),
        capacity=4096,
    )


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "1"),
        ("id,lower,size\na,0,1\n", "1"),
        ("id,lower,upper,size\na,0,1\n", "2"),
        ("id,lower,upper,size\na,0,1,ten\n", "2"),
        ("id,lower,upper,size\na,0,1,10\nb,5,5,10\n", "3"),
        ("id,lower,upper,size\na,0,1,-10\n", "2"),
    ],
)
def test_errors_name_the_line(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(UnreadableFile) as caught:
        read_problem(path)
    assert caught.value.where == f"{path}:{line}"


def test_duplicate_ids_and_missing_files(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("id,lower,upper,size\na,0,1,1\na,0,1,1\n")
    with pytest.raises(UnreadableFile, match="not unique"):
        read_problem(path)
    with pytest.raises(UnreadableFile, match="cannot be read"):
        read_problem(tmp_path / "absent.csv")


@given(problem=problems(aligned=False, gaps=False))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_written_reads_back_with_its_offsets(tmp_path: Path, problem: Problem) -> None:
    path = tmp_path / "out.csv"
    solution = solve(problem)
    write_solution(path, problem, solution)
    assert read_problem(path).buffers == problem.buffers
    rows = [line.split(",") for line in path.read_text().splitlines()]
    assert rows[0] == ["id", "lower", "upper", "size", "offset"]
    assert {row[0]: int(row[4]) for row in rows[1:]} == dict(solution.offsets)


def test_what_no_file_system_takes_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    problem = Problem(buffers=(Buffer(id="a", size=1, live=Interval(0, 1)),))
    for path in (tmp_path / "file" / "below.csv", tmp_path / "a\0b.csv", tmp_path, tmp_path / "no" / "folder.csv"):
        with pytest.raises(UnreadableFile, match="cannot be read"):
            read_problem(path)
        with pytest.raises(UnreadableFile, match="cannot be written"):
            write_solution(path, problem, solve(problem))
    odd = Problem(buffers=(Buffer(id="\udc80", size=1, live=Interval(0, 1)),))  # half of a surrogate pair
    with pytest.raises(UnreadableFile, match="cannot be written"):
        write_solution(tmp_path / "odd.csv", odd, solve(odd))
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("file", "kept")]


def test_a_solution_without_offsets_is_not_written(tmp_path: Path) -> None:
    problem = Problem(buffers=(Buffer(id="a", size=9, live=Interval(0, 1)),), capacity=8)
    nothing = Solution(offsets={}, arena_size=0, status=Status.INFEASIBLE, bound=9, solver="none")
    with pytest.raises(InvalidSolution, match="buffer 'a': has no offset"):
        write_solution(tmp_path / "out.csv", problem, nothing)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("x.4096.csv", 4096), ("x.csv", None), ("x", None), ("x.part.csv", None), ("x.².csv", None), ("x.٣.csv", None)],
)
def test_only_a_number_in_the_name_is_a_capacity(tmp_path: Path, name: str, capacity: int | None) -> None:
    path = tmp_path / name
    path.write_text("id,lower,upper,size\na,0,1,1\n")
    assert read_problem(path).capacity == capacity


@pytest.mark.parametrize(
    ("header", "row"),
    [
        ("id,lower,upper,size,colour", "a,0,1,1,red"),  # unknown
        ("id,lower,upper,size,size", "a,0,1,1,1"),  # twice
        ("id,lower,upper,alignment", "a,0,1,1"),  # missing
    ],
)
def test_headers_with_other_columns_are_refused(tmp_path: Path, header: str, row: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(f"{header}\n{row}\n")
    with pytest.raises(UnreadableFile, match=f"the header is '{header}'") as caught:
        read_problem(path)
    assert caught.value.where == f"{path}:1"


@pytest.mark.parametrize(("row", "count"), [("a,0,1", 3), ("a,0,1,10,9", 5)])
def test_rows_that_are_shorter_or_longer_than_the_header_are_refused(tmp_path: Path, row: str, count: int) -> None:
    path = tmp_path / "row.csv"
    path.write_text(f"id,lower,upper,size\nb,0,1,1\n{row}\n")
    with pytest.raises(UnreadableFile, match=f"{count} fields, the header has 4") as caught:
        read_problem(path)
    assert caught.value.where == f"{path}:3"


def test_nothing_is_left_beside_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    target = tmp_path / "folder"
    target.mkdir()
    problem = Problem(buffers=(Buffer(id="a", size=1, live=Interval(0, 1)),))
    with pytest.raises(UnreadableFile, match="cannot be written"):
        write_solution(target, problem, solve(problem))
    assert list(tmp_path.iterdir()) == [target]
