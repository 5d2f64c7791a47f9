"""The page of budgets in a real browser: its curve, its tables, and the plans that its points open."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from memplan.planning.frontier import Frontier, frontier
from memplan.planning.make_plan import ScheduledGraph
from memplan.planning.options import PlanOptions
from memplan.report.forms import frontier_form
from memplan.report.pages import frontier_data, frontier_html
from memplan.report.picture import picture_of_plan
from memplan.schedule import traced
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Page, open_html
from tests.samples import deep_graph

WITH_BROWSER = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)
SCHEDULED = ScheduledGraph(
    model="deep", graph=deep_graph(), schedule=traced(deep_graph()), alignment=64, versions={}, reserve=0
)


@cache
def _frontier() -> Frontier:
    return frontier(SCHEDULED, PlanOptions(policy="genoa"), costs="a100")


@cache
def budgets_html() -> str:
    points = _frontier().points
    pictures = {id(p.plan): picture_of_plan(p.plan) for p in points if p.plan is not None}
    return frontier_html(frontier_form("deep", _frontier()), _frontier(), [pictures.get(id(p.plan)) for p in points])


@pytest.fixture
def budgets(page: Page, tmp_path: Path) -> Page:
    return open_html(page, tmp_path, budgets_html())


def test_points_have_plans_that_keep_their_budgets() -> None:
    points = _frontier().points
    assert any(p.plan is None for p in points)
    assert any(p.plan is not None and p.plan.evictions for p in points)
    assert all(p.plan is None or p.plan.on_device <= p.budget for p in points)


def test_a_page_without_pictures_has_points_that_open_nothing() -> None:
    data = frontier_data(frontier_form("deep", _frontier()), _frontier())
    assert data["plans"] == []
    assert {point["plan"] for point in data["points"]} == {None}


@WITH_BROWSER
def test_the_curve_has_every_point_and_axes_with_units(budgets: Page) -> None:
    kept = budgets.run("return window.memplan.data.points.length")
    assert kept > 2
    assert budgets.run("return document.querySelectorAll('#plot .ours').length") == kept
    texts = budgets.run("return [...document.querySelectorAll('#plot text')].map(t => t.textContent)")
    assert "total on the device: share of the predicted eager total, bytes" in texts
    assert "predicted time of a step, % over no budget" in texts
    assert "cannot be kept" in budgets.run("return document.getElementById('sections').innerText")
    boxes = budgets.run(
        "const s = document.querySelector('#plot svg').getBoundingClientRect();"
        "return [...document.querySelectorAll('#plot .point')].map(c => { const r = c.getBoundingClientRect();"
        " return r.left >= s.left && r.right <= s.right && r.top >= s.top && r.bottom <= s.bottom })"
    )
    assert all(boxes), "every point is inside"


@WITH_BROWSER
def test_a_point_opens_its_plan_and_another_one_replaces_it(budgets: Page) -> None:
    points = budgets.run("return window.memplan.data.points.map(p => [p.row, p.plan, p.total])")
    budgets.run("document.querySelectorAll('#plot .ours')[0].dispatchEvent(new MouseEvent('click'))")
    budgets.wait("return window.memplan.opened()")
    first = budgets.run("return window.memplan.opened().plan.data.arena")
    assert first == 7 << 20
    last = next(k for k, point in reversed(list(enumerate(points))) if point[1] != points[0][1])
    budgets.run("document.querySelectorAll('#plot .ours')[arguments[0]].focus()", last)
    budgets.press("\ue007")
    budgets.wait(f"const r = window.memplan.opened(); return r && r.plan.data.arena < {first}")
    assert budgets.run("return document.querySelectorAll('#report .arena').length") == 1
    assert "computed again, " in budgets.run("return document.getElementById('cards').innerText")
    budgets.press("p")
    assert "Alive at step" in budgets.run("return document.getElementById('listed').textContent")
    budgets.wait("return location.hash.startsWith('#budget=')")
    budgets.run("document.getElementById('close').click()")
    assert budgets.run("return window.memplan.opened() === null")
    budgets.wait("return location.hash === ''")
