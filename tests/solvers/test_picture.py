"""The picture shows every live interval where the plan puts it."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import replace

from hypothesis import given, settings

from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import solve
from memplan.solvers.picture import to_svg
from tests.strategies import problems

_SVG = "{http://www.w3.org/2000/svg}"


@given(problem=problems())
@settings(max_examples=40, deadline=None)
def test_one_rectangle_for_every_live_interval_none_outside(problem: Problem) -> None:
    root = ET.fromstring(to_svg(problem, solve(problem), width=400, height=200))
    shapes = root.findall(f".//{_SVG}g/{_SVG}rect")
    assert len(shapes) == sum(len(b.segments) for b in problem.buffers if b.size)
    for shape in shapes:
        x, y, w, h = (float(shape.attrib[name]) for name in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= -0.01
        assert x + w <= 400.01
        assert y + h <= 200.01


def test_names_are_escaped() -> None:
    problem = Problem(buffers=(Buffer(id="<&>", size=8, live=Interval(0, 1)),), capacity=16)
    assert ET.fromstring(to_svg(problem, solve(problem))).find(f".//{_SVG}title") is not None


def test_positions_colours_titles_and_lines_by_hand() -> None:
    """Four steps on 400 pixels, 20 bytes on 200: a hundred pixels for a step and ten for a byte."""
    made = (
        Buffer(id="a", size=4, live=Interval(2, 4), kind="activation"),
        Buffer(id="none", size=0, live=Interval(2, 6)),
        Buffer(id="b", size=6, live=Interval(2, 6), gaps=(Interval(3, 5),)),
    )
    problem = Problem(buffers=made, capacity=20)
    solution = replace(solve(problem, solver="naive"), bound=8)
    root = ET.fromstring(to_svg(problem, solution, width=400, height=200))
    assert root.attrib["viewBox"] == "0 0 400 200"
    shapes = root.findall(f".//{_SVG}g/{_SVG}rect")
    boxes = [[float(shape.attrib[name]) for name in ("x", "y", "width", "height")] for shape in shapes]
    assert boxes == [[0, 160, 200, 40], [0, 100, 100, 60], [300, 100, 100, 60]]
    assert [shape.attrib["fill"] for shape in shapes] == ["#4e79a7", "#76b7b2", "#76b7b2"]
    titles = [title.text for title in root.findall(f".//{_SVG}title")]
    assert titles[:2] == [
        "a: 4 bytes at bytes 0 to 4, steps 2 to 4, activation",
        "b: 6 bytes at bytes 4 to 10, steps 2 to 6",
    ]
    lines = [
        (line.attrib["y1"], line.attrib["y2"], line.attrib["x1"], line.attrib["x2"], line.attrib["stroke-dasharray"])
        for line in root.findall(f"{_SVG}line")
    ]
    assert lines == [("120.00", "120.00", "0", "400", "2,3"), ("0.00", "0.00", "0", "400", "8,4")]


def test_colours_repeat_and_an_empty_problem_is_empty() -> None:
    many = Problem(buffers=tuple(Buffer(id=str(i), size=1, live=Interval(0, 1)) for i in range(10)))
    shapes = ET.fromstring(to_svg(many, solve(many))).findall(f".//{_SVG}g/{_SVG}rect")
    assert len({shape.attrib["fill"] for shape in shapes}) == 9
    assert shapes[9].attrib["fill"] == shapes[0].attrib["fill"]
    empty = Problem(buffers=())
    root = ET.fromstring(to_svg(empty, solve(empty)))
    assert root.attrib["viewBox"] == "0 0 1000 500"
    assert not root.findall(f".//{_SVG}g/{_SVG}rect")
    assert [line.attrib["y1"] for line in root.findall(f"{_SVG}line")] == ["500.00"]
