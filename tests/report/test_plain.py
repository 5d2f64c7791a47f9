"""`print` and notebooks show a plan and its report, and a table says who sits where."""

from __future__ import annotations

import dataclasses
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.core.units import format_bytes
from memplan.report import lines as words
from memplan.report.lines import memory_lines
from memplan.report.text_diagrams import partition_table
from memplan.solvers.baselines import partitions
from tests.graph_strategies import plans
from tests.samples import sample_plan


@given(plans())
def test_every_plan_is_printed_with_every_part_of_its_total(plan: Plan) -> None:
    report = plan.report()
    text = str(plan)
    assert text == str(report)
    for group in memory_lines(report):
        for label, size, _ in group:
            line = next(line for line in text.splitlines() if line.startswith(f"{label} "))
            assert size is None or format_bytes(size) in line
    assert max(map(len, (repr(plan), repr(report)))) < 200
    assert plan.fingerprint[:12] in repr(plan)


def test_names_cannot_break_out_of_a_notebook() -> None:
    hostile = dataclasses.replace(sample_plan(), model="<script>alert(1)</script>\x1b[31m")
    assert "<script>" not in hostile._repr_html_()
    assert "\x1b" not in str(hostile)
    assert "\x1b" not in hostile.report()._repr_html_()


def test_a_notebook_shows_the_picture_unless_it_has_too_many_buffers() -> None:
    plan = sample_plan()
    assert "<svg" in plan._repr_html_()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(words, "MOST_BLOCKS", len(plan.problem.buffers) - 1)
        assert "<svg" not in plan._repr_html_()
        assert "<div>This step needs 768 B with AdamW" in plan._repr_html_()


def test_pages_and_pictures_come_as_text() -> None:
    plan = sample_plan()
    assert plan.to_html().lower().startswith("<!doctype html>")
    assert ET.fromstring(plan.to_svg()).tag.endswith("svg")


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
