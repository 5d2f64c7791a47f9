"""C6: the step x partition table."""

from __future__ import annotations

from hypothesis import given

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.report.text_diagrams import partition_table
from memplan.solvers.baselines import partitions
from tests.graph_strategies import plans
from tests.samples import sample_plan


def _buffer(name: str, size: int, start: int, end: int) -> Buffer:
    return Buffer(id=name, size=size, live=Interval(start, end))


def test_c6_the_table_shows_who_sits_where_and_when() -> None:
    problem = Problem(buffers=(_buffer("a", 10, 0, 2), _buffer("b", 8, 2, 4), _buffer("c", 5, 1, 3)))
    assert partition_table(problem).splitlines() == [
        " step | 0  | 1",
        "    0 | a  | *",
        "    1 | a  | c",
        "    2 | b  | c",
        "    3 | b  | *",
        "bytes | 10 | 5",
        "2 partitions, 15 bytes; max live 15 bytes",
    ]


def test_steps_in_which_nothing_changes_share_a_row() -> None:
    lines = partition_table(Problem(buffers=(_buffer("a", 10, 0, 1000),))).splitlines()
    assert lines[1] == "0-999 | a"


def test_an_empty_problem_has_an_empty_table() -> None:
    assert "0 partitions, 0 bytes" in partition_table(Problem(buffers=()))


def test_long_and_unprintable_ids_keep_the_columns() -> None:
    text = partition_table(Problem(buffers=(_buffer("x" * 500, 1, 0, 1), _buffer("\x1b[31m\n", 1, 0, 1))))
    assert len(text.splitlines()) == 4
    assert max(map(len, text.splitlines())) < 80
    assert "\x1b" not in text


def test_a_plan_prints_its_table() -> None:
    assert "3 partitions" in sample_plan().to_text()


@given(plans())
def test_c6_every_buffer_stands_in_its_partition_at_every_step(plan: Plan) -> None:
    problem = plan.problem
    columns = partitions(problem)
    rows = partition_table(problem).splitlines()[1:-2]
    for row in rows:
        label, *cells = (cell.strip() for cell in row.split("|"))
        first, _, last = label.partition("-")
        for step in (int(first), int(last or first)):
            for members, cell in zip(columns, cells, strict=True):
                alive = [b.id for b in members if b.live.is_alive_at_step(step)]
                assert cell == (alive[0] if alive else "*")
