"""The HTML picture in a real browser: hover, find, list, modules; silent and alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from memplan.core.problem import Buffer, Interval, Problem
from memplan.report.pages import diff_html, picture_html
from memplan.report.picture import picture_of, picture_of_plan
from memplan.solvers import solve
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Page, open_html
from tests.report.test_budget_page import budgets_html
from tests.samples import deep_plan, sample_plan

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture
def sample(page: Page, tmp_path: Path) -> Page:
    return open_html(page, tmp_path, picture_html(picture_of_plan(sample_plan())))


def _place(page: Page, name: str) -> tuple[float, float]:
    found: dict[str, float] = page.run("return window.memplan.place(window.memplan.index(arguments[0]))", name)
    return found["x"], found["y"]


def _tip(page: Page) -> str:
    text: str = page.run(
        "const t = document.getElementById('tip'); return t.style.display === 'block' ? t.innerText : ''"
    )
    return text


def _view(page: Page) -> dict[str, float]:
    found: dict[str, float] = page.run("return window.memplan.view()")
    return found


def test_figures_and_advice_are_on_the_page(sample: Page) -> None:
    text = sample.run("return document.body.innerText")
    for part in (
        "sample: forward + backward, 5 steps, 3 buffers",
        "320 B",
        "Largest buffers: 3",
        "What would shrink it",
    ):
        assert part in text
    assert sample.run("return document.title").startswith("memplan: sample")


def test_hover_shows_origin_and_size_and_leaves_with_the_pointer(sample: Page) -> None:
    sample.point(*_place(sample, "activation_2"))
    tip = _tip(sample)
    for part in (
        "128 B",
        "activation_2",
        "module h.0.attn",
        "source model.py:12",
        "op aten.mm",
        "tensor uint8 [100]",
        "steps 0 to 4",
        "offset",
    ):
        assert part in tip
    sample.point(3, 3)
    assert _tip(sample) == ""


def test_find_narrows_the_list_and_a_row_shows_its_block(sample: Page) -> None:
    sample.run("const f = document.getElementById('find'); f.value = 'NORM'; f.dispatchEvent(new Event('input'))")
    assert sample.run("return document.getElementById('rows').children.length") == 1
    for _ in range(4):
        sample.run("document.getElementById('in').click()")
    before = _view(sample)
    sample.run("document.querySelector('#rows tr').click()")
    assert _view(sample) != before


def test_names_from_a_file_run_nothing(page: Page, tmp_path: Path) -> None:
    evil = "</script><img src=x onerror=\"document.title='gone'\"><script>alert(1)</script>"
    plan = dataclasses.replace(sample_plan(), model=evil)
    open_html(page, tmp_path, picture_html(picture_of_plan(plan)))
    assert page.run("return document.querySelectorAll('img').length") == 0
    assert page.run("return document.getElementById('title').textContent").startswith("</script><img")


@pytest.mark.parametrize("count", [0, 1, 5000])
def test_problems_of_every_size_are_drawn(page: Page, tmp_path: Path, count: int) -> None:
    rng = random.Random(count)
    buffers = []
    for i in range(count):
        start = rng.randrange(4000)
        gaps = (Interval(start + 20, start + 60),) if i % 50 == 7 else ()
        live = Interval(start, start + rng.randrange(61, 400))
        buffers.append(Buffer(id=f"b{i}", size=rng.randrange(64, 65536), live=live, gaps=gaps, kind=f"kind{i % 9}"))
    problem = Problem(buffers=tuple(buffers))
    solution = solve(problem, solver="naive")
    open_html(page, tmp_path, picture_html(picture_of(problem, solution, "random.csv")))
    assert page.run("return window.memplan.plan.n") == count
    if count:
        largest = max(problem.buffers, key=lambda b: b.size).id
        page.run("window.memplan.show(window.memplan.index(arguments[0]))", largest)
        page.wait("return !window.memplan.report.arena.due")
        page.point(*_place(page, largest))
        assert largest in _tip(page)


@pytest.mark.parametrize(
    ("policy", "says"), [("recompute", "computed again"), ("genoa", "copied to the host, and back")]
)
def test_evictions_are_arrows_and_both_their_blocks_say_so(page: Page, tmp_path: Path, policy: str, says: str) -> None:
    picture = picture_of_plan(deep_plan(policy))
    drawing = "return document.getElementById('arena').toDataURL()"
    open_html(page, tmp_path, picture_html(dataclasses.replace(picture, arrows=())))
    bare = page.run(drawing)
    open_html(page, tmp_path, picture_html(picture))
    assert page.run(drawing) != bare
    assert "budget" in page.run("return document.getElementById('cards').innerText")
    for name in (picture.arrows[0].leaves, picture.arrows[0].returns):
        page.point(*_place(page, name))
        assert picture.arrows[0].about in _tip(page)
        assert says in _tip(page)


DOWN, UP, ENTER, SPACE = "\ue015", "\ue013", "\ue007", " "


def _rows(page: Page) -> list[str]:
    page.wait("return document.getElementById('rows').children.length")
    found: list[str] = page.run("return [...document.getElementById('rows').children].map(r => r.innerText)")
    return found


def test_a_click_keeps_the_details_and_a_second_one_closes_them(page: Page, tmp_path: Path) -> None:
    open_html(page, tmp_path, picture_html(picture_of_plan(sample_plan())))
    page.point(*_place(page, "activation_2"), press=True)
    text = page.run("return document.getElementById('pins').innerText")
    for part in ("128 B", "activation_2", "uint8 [100]", "h.0.attn"):
        assert part in text
    page.point(3, 3)
    assert "activation_2" in page.run("return document.getElementById('pins').innerText")
    page.point(*_place(page, "activation_2"), press=True)
    assert page.run("return document.getElementById('pins').children.length") == 0


def test_the_tree_of_modules_filters_the_page(sample: Page) -> None:
    names = "return [...document.querySelectorAll('#tree .name')].map(n => n.textContent)"
    assert sample.run(names) == ["h", "no module", "layers[1]"]
    sizes = sample.run("return [...document.querySelectorAll('#tree .bytes')].map(n => n.textContent)")
    assert sizes == ["128 B", "128 B", "64 B"], "at the peak"
    sample.run("document.querySelector('#tree .node').click()")
    assert [row.split()[-1] for row in _rows(sample)] == ["activation_2"]
    assert sample.run("return [...window.memplan.report.look.mask]").count(1) == 1
    sample.run("document.getElementById('clear').click()")
    assert len(_rows(sample)) == 3


BLUE, ORANGE, GREEN = (0x2F, 0x6F, 0xD8), (0xB8, 0x52, 0x0F), (0x2A, 0x7D, 0x3F)
PAGES: dict[str, tuple[Callable[[], str], tuple[tuple[int, int, int], ...]]] = {
    "activations and gradients": (lambda: picture_html(picture_of_plan(deep_plan("genoa"))), (BLUE, ORANGE)),
    "what left the peak and what came": (lambda: diff_html(deep_plan(), deep_plan("genoa")), (BLUE, GREEN)),
    "the curve": (budgets_html, ()),
}


def test_only_its_own_script_may_run(sample: Page) -> None:
    sample.run("const s = document.createElement('script'); s.textContent = 'window.evil = 1'; document.body.append(s)")
    assert sample.run("return window.evil === undefined")
    refused = sample.log("browser")
    assert any("Content Security Policy" in entry["message"] for entry in refused)
