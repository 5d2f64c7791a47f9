"""The HTML picture in a real browser: hover, zoom, pan, find, list, themes; silent and alone."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from memplan.core.plan import Plan
from memplan.core.problem import Buffer, Interval, Problem
from memplan.report.html import page_data, picture_html
from memplan.report.picture import picture_of, picture_of_plan
from memplan.solvers import solve
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Page, browser
from tests.samples import deep_plan, sample_plan

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Page]:
    with browser() as page:
        yield page


@pytest.fixture
def page(chromium: Page) -> Iterator[Page]:
    """The browser; afterwards its console must be empty, and nothing but files and data may have been asked for."""
    yield chromium
    assert chromium.log("browser") == []
    requests = [json.loads(entry["message"])["message"] for entry in chromium.log("performance")]
    urls = [r["params"]["request"]["url"] for r in requests if r["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(("file:", "data:")) for url in urls), urls


@pytest.fixture
def sample(page: Page, tmp_path: Path) -> Page:
    return _open(page, tmp_path, picture_html(picture_of_plan(sample_plan())))


def _open(page: Page, folder: Path, html: str) -> Page:
    (folder / "page.html").write_text(html, encoding="utf-8")
    return page.open(folder / "page.html")


def _place(page: Page, name: str) -> tuple[float, float]:
    found: dict[str, float] = page.run(
        "return window.memplan.place(window.memplan.blocks.find(b => b.id === arguments[0]).index)", name
    )
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
        "steps 0 to 4",
        "offset",
    ):
        assert part in tip
    sample.point(3, 3)
    assert _tip(sample) == ""


def test_wheel_zooms_around_the_pointer_and_a_double_click_shows_all(sample: Page) -> None:
    x, y = _place(sample, "activation_3")
    before = _view(sample)
    sample.wheel(x, y, -240)
    zoomed = _view(sample)
    assert zoomed["x1"] - zoomed["x0"] < before["x1"] - before["x0"]
    assert zoomed["y1"] - zoomed["y0"] < before["y1"] - before["y0"]
    sample.point(*_place(sample, "activation_3"))
    assert "activation_3" in _tip(sample)
    sample.drag(x, y, 120, 0)
    assert _view(sample)["x0"] < zoomed["x0"]
    sample.run("document.getElementById('reset').click()")
    assert _view(sample) == before


def test_buttons_keys_and_theme(sample: Page) -> None:
    before = _view(sample)
    sample.run("document.getElementById('in').click()")
    assert _view(sample)["x1"] - _view(sample)["x0"] < before["x1"] - before["x0"]
    sample.run("document.getElementById('arena').dispatchEvent(new KeyboardEvent('keydown', {key: '0'}))")
    assert _view(sample) == before
    was = sample.run("return document.documentElement.dataset.theme")
    sample.run("document.getElementById('theme').click()")
    assert {was, sample.run("return document.documentElement.dataset.theme")} == {"light", "dark"}


def test_a_click_on_a_step_lists_who_is_alive_there(sample: Page) -> None:
    spot = sample.run(
        "const r = document.getElementById('live').getBoundingClientRect(); return [r.left, r.top, r.width]"
    )
    step = 84 + (spot[2] - 98) * (3.5 / 5)
    sample.run("document.getElementById('live').scrollIntoView()")
    spot = sample.run(
        "const r = document.getElementById('live').getBoundingClientRect(); return [r.left, r.top, r.width]"
    )
    sample.point(spot[0] + step, spot[1] + 60)
    assert "320 B live" in _tip(sample)
    assert "backward aten.expand" in _tip(sample)
    sample.point(spot[0] + step, spot[1] + 60, press=True)
    assert sample.run("return document.getElementById('listed').textContent").startswith(
        "Alive at step 3: 3 buffers, 320 B"
    )


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
    _open(page, tmp_path, picture_html(picture_of_plan(plan)))
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
    _open(page, tmp_path, picture_html(picture_of(problem, solution, "random.csv")))
    assert page.run("return window.memplan.blocks.length") == count
    if count:
        largest = max(problem.buffers, key=lambda b: b.size).id
        page.run("const b = window.memplan.blocks.find(b => b.id === arguments[0]); window.memplan.show(b)", largest)
        page.point(*_place(page, largest))
        assert largest in _tip(page)


def test_the_page_holds_the_whole_plan() -> None:
    plan: Plan = sample_plan()
    data: dict[str, Any] = page_data(picture_of_plan(plan))
    assert {b[0]: b[2] for b in data["blocks"]} == dict(plan.solution.offsets)
    assert len(data["ops"]) == 5
    assert data["backwardFrom"] == 3


@pytest.mark.parametrize(
    ("policy", "says"), [("recompute", "computed again"), ("genoa", "copied to the host, and back")]
)
def test_evictions_are_arrows_and_both_their_blocks_say_so(page: Page, tmp_path: Path, policy: str, says: str) -> None:
    picture = picture_of_plan(deep_plan(policy))
    drawing = "return document.getElementById('arena').toDataURL()"
    _open(page, tmp_path, picture_html(dataclasses.replace(picture, arrows=())))
    bare = page.run(drawing)
    _open(page, tmp_path, picture_html(picture))
    assert page.run(drawing) != bare
    assert "budget" in page.run("return document.getElementById('cards').innerText")
    for name in (picture.arrows[0].leaves, picture.arrows[0].returns):
        page.point(*_place(page, name))
        assert picture.arrows[0].about in _tip(page)
        assert says in _tip(page)


def test_the_page_holds_every_arrow() -> None:
    picture = picture_of_plan(deep_plan("genoa"))
    data: dict[str, Any] = page_data(picture)
    assert [(a[0], a[2], a[4], a[6], a[7]) for a in data["arrows"]] == [
        (a.start, a.end, 1, a.leaves, a.returns) for a in picture.arrows
    ]
