"""CSV in and out, in minimalloc's format."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings

from memplan.core.csvio import parse_problem, read_problem, write_solution
from memplan.core.files import write_atomic
from memplan.core.problem import Buffer, Interval, Problem, Solution, Status
from memplan.core.validate import validate
from memplan.errors import InvalidSolution, UnreadableFile
from memplan.solvers import solve
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


@given(problem=problems())
@settings(max_examples=30)
def test_what_is_written_reads_back_with_its_offsets(tmp_path: Path, problem: Problem) -> None:
    path = tmp_path / "out.csv"
    solution = solve(problem)
    write_solution(path, problem, solution)
    pinned = tuple(replace(b, pinned_offset=solution.offsets[b.id]) for b in problem.buffers)
    assert read_problem(path).buffers == pinned
    rows = [line.split(",") for line in path.read_text().splitlines()]
    aligned, gaps = any(b.alignment > 1 for b in pinned), any(b.gaps for b in pinned)
    assert rows[0] == [*HEAD.split(","), *["alignment"] * aligned, *["gaps"] * gaps, "offset"]
    assert {row[0]: int(row[-1]) for row in rows[1:]} == dict(solution.offsets)


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


HEAD = "id,lower,upper,size"


@pytest.mark.parametrize(
    ("content", "line", "what"),
    [
        ("", 1, "is empty: it has no header"),
        (" \n", 1, "is empty: it has no header"),
        ("id,lower,upper,size,size\n", 1, "the header is 'id,lower,upper,size,size'"),
        ("id,lower,upper,size,color\n", 1, "the header is 'id,lower,upper,size,color'"),
        ("id,lower,upper\n", 1, "the header is 'id,lower,upper'"),
        (f"{HEAD}\na,0,1,2,3\n", 2, "5 fields, the header has 4"),
        (f"{HEAD}\na,0,1\n", 2, "3 fields, the header has 4"),
        (f"{HEAD}\na,0,1,2\nb,0,1,-2\n", 3, "size is -2"),
        (f"{HEAD},alignment\na,0,1,2,0\n", 2, "alignment is 0"),
        ("id,lower,begin,upper,size\n", 1, "the header is 'id,lower,begin,upper,size'"),
        (f"{HEAD},gaps\na,0,9,2,1-2-3\n", 2, "gaps has '1-2-3', which is no gap"),
        (f"{HEAD},gaps\na,0,9,2,A-B\n", 2, "gaps has 'A-B', which is no gap"),
        (f"{HEAD},gaps\na,0,9,2,1-3@1\n", 2, "gaps has '1-3@1', which is no gap"),
        (f"{HEAD},gaps\na,0,9,2,3-3\n", 2, "gaps has '3-3', which is no gap"),
        (f"{HEAD},gaps\na,0,9,2,1-4 3-5\n", 2, "gaps: [3, 5) overlaps another gap, or leaves the lifetime"),
        (f"{HEAD},gaps\na,0,9,2,8-10\n", 2, "gaps: [8, 10) overlaps another gap, or leaves the lifetime"),
        (f"{HEAD},gaps\na,0,9,2,0-9\n", 2, "gaps cover the whole lifetime"),
        (f"{HEAD},offset\na,0,9,2,x\n", 2, "offset is 'x', not a whole number"),
        (f"{HEAD},offset\na,0,9,2,-1\n", 2, "offset: pinned offset -1 is negative or not a multiple of 1"),
        (f"{HEAD}\na,4,4,2\n", 2, "upper is 4, not above lower, which is 4"),
        (f"{HEAD}\na,4,3,2\n", 2, "upper is 3, not above lower, which is 4"),
        (f"{HEAD}\na,0,1,ten\n", 2, "size is 'ten', not a whole number"),
        (f"{HEAD}\na,0,1,\n", 2, "size is '', not a whole number"),
        (f"{HEAD}\na,0,1,1_0\n", 2, "size is '1_0', not a whole number"),
        (f"{HEAD}\na,0,1,{'9' * 19}\n", 2, f"size is {'9' * 19}, more than 18 digits"),
        (f"{HEAD}\na,0,1,{'9' * 5000}\n", 2, f"size is {'9' * 57}..., more than 18 digits"),
        (f'{HEAD}\n"a,0,1,2\n', 2, "is not CSV: unexpected end of data"),
    ],
)
def test_each_fault_says_what_where_and_the_next_step(tmp_path: Path, content: str, line: int, what: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(content)
    with pytest.raises(UnreadableFile) as caught:
        read_problem(path)
    assert (caught.value.what, caught.value.where) == (what, f"{path}:{line}")
    assert caught.value.hint


def test_a_gap_is_used_by_others_and_the_buffer_is_back_at_its_offset() -> None:
    problem = parse_problem(f"{HEAD},gaps\na,0,10,8,1-9\nb,5,15,8,6-14\nc,1,5,8,\n".encode(), "x")
    assert solve(problem).arena_size == 8
    assert solve([replace(b, gaps=()) for b in problem.buffers]).arena_size == 16
    overlapping = parse_problem(f"{HEAD},gaps,offset\na,0,10,8,1-7,0\nb,5,15,8,8-14,0\n".encode(), "x")
    said = Solution(offsets={"a": 0, "b": 0}, arena_size=8, status=Status.FEASIBLE, bound=8, solver="")
    with pytest.raises(InvalidSolution, match="both alive at step 7"):
        validate(overlapping, said)


def test_gaps_that_touch_are_one_and_those_at_an_end_shorten_the_lifetime() -> None:
    (buffer,) = parse_problem(f"{HEAD},gaps\na,0,20,8,0-2 6-7 4-6 18-20\n".encode(), "x").buffers
    assert buffer == Buffer(id="a", size=8, live=Interval(2, 18), gaps=(Interval(4, 7),))


@pytest.mark.parametrize(
    ("name", "capacity"),
    [("x.4096.csv", 4096), ("x.0.csv", 0), ("4096.csv", None), ("x.csv", None), ("x.12.old.csv", None),
     ("x.1k.csv", None), ("x.\u0663.csv", None), ("x.4096", None), ("a.1.22.csv", 22)],
)  # fmt: skip
def test_a_capacity_stands_before_the_last_ending(tmp_path: Path, name: str, capacity: int | None) -> None:
    (tmp_path / name).write_text(f"{HEAD}\na,0,1,2\n")
    assert read_problem(tmp_path / name).capacity == capacity


def test_what_is_no_text_and_what_is_no_file_differ(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xff\xfeid")
    with pytest.raises(UnreadableFile, match=r"is not UTF-8 text: .*invalid start byte") as caught:
        read_problem(path)
    assert caught.value.where == str(path)
    with pytest.raises(UnreadableFile, match="cannot be read: No such file or directory"):
        read_problem(tmp_path / "none.csv")
    with pytest.raises(UnreadableFile, match="buffer 'a': id is not unique") as caught:
        parse_problem(f"{HEAD}\na,0,1,2\na,0,1,2\n".encode(), "x")
    assert caught.value.where == "x"


def test_what_cannot_be_written_leaves_no_scratch_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "scratch")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(UnreadableFile) as caught:
        write_atomic(tmp_path / "out.csv", "text")
    assert (caught.value.what, caught.value.where) == (
        "cannot be written: Permission denied",
        str(tmp_path / "out.csv"),
    )
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_written_to_and_a_link_to_itself_is_no_place(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    try:
        write_atomic(Path(f"/dev/fd/{writer}"), "text")
        assert os.read(reader, 10) == b"text"
    finally:
        os.close(reader)
        os.close(writer)
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(UnreadableFile, match="cannot be written"):
        write_atomic(loop, "text")
