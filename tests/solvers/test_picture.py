"""The picture shows every live interval where the plan puts it."""

from __future__ import annotations

import xml.etree.ElementTree as ET

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
