"""The page of two plans in a real browser: pairs, changes by module, linked zoom."""

from __future__ import annotations

from pathlib import Path

import pytest

from memplan.analysis.diff import diff
from memplan.report.pages import diff_html
from tests.report.browser import CHROMIUM, DRIVER, MISSING, Page, open_html
from tests.samples import deep_plan, sample_plan

pytestmark = pytest.mark.skipif(not (CHROMIUM and DRIVER), reason=MISSING)

PAIRS = {
    "same": lambda: (sample_plan(), sample_plan()),
    "grew": lambda: (sample_plan(), sample_plan(alignment=512)),
    "shrank": lambda: (sample_plan(alignment=512), sample_plan()),
    "evicted": lambda: (deep_plan(), deep_plan("genoa")),
    "back": lambda: (deep_plan("recompute"), deep_plan()),
}


@pytest.fixture
def evicted(page: Page, tmp_path: Path) -> Page:
    return open_html(page, tmp_path, diff_html(deep_plan(), deep_plan("genoa")))


def _place(page: Page, side: int, name: str) -> tuple[float, float]:
    found = page.run("return window.memplan.place(arguments[0], window.memplan.index(...arguments))", side, name)
    return found["x"], found["y"]


@pytest.mark.parametrize("name", PAIRS)
def test_the_page_counts_what_the_comparison_counts(page: Page, tmp_path: Path, name: str) -> None:
    before, after = PAIRS[name]()
    found = diff(before, after)
    open_html(page, tmp_path, diff_html(before, after))
    counts = page.run(
        "const m = window.memplan, n = Array(7).fill(0);"
        "m.changes[1].forEach((c, i) => { n[c]++; if (m.moves[1][i]) n[m.moves[1][i]]++ });"
        "m.changes[0].forEach(c => { if (c === 2) n[2]++ }); return n"
    )
    wanted = [found.came, found.went, found.grew, found.shrank, found.to_peak, found.off_peak]
    assert counts[1:] == [len(change) for change in wanted]
    rows = page.run("return document.querySelectorAll('#rows tr').length")
    sized = {b.id for _, b in (*found.grew, *found.shrank)}
    moved = [b for _, b in (*found.to_peak, *found.off_peak) if b.id not in sized]
    assert rows == len(found.came) + len(found.went) + len(sized) + len(moved)
    assert name == "same" or rows
    totals = page.run("return document.getElementById('totals').innerText")
    assert "arena" in totals


def test_bytes_at_the_peak_are_divided_among_the_modules(page: Page, tmp_path: Path) -> None:
    before, after = sample_plan(), sample_plan(alignment=512)
    open_html(page, tmp_path, diff_html(before, after))
    rows = page.run(
        "return [...document.querySelectorAll('#modules tr')].map(r => [...r.children].map(c => c.textContent))"
    )
    assert [row[:4] for row in rows] == [
        ["layers[*].norm", "64 B", "512 B", "+448 B"],
        ["h.*.attn", "128 B", "512 B", "+384 B"],
        ["no module", "128 B", "512 B", "+384 B"],
    ]
    assert [row[4:] for row in rows] == [["", "", "1", "", "", ""]] * 3


def test_zoom_is_linked_until_it_is_not(evicted: Page) -> None:
    views = "return window.memplan.views()"
    whole = evicted.run(views)
    assert whole[0] == whole[1]
    evicted.wheel(*_place(evicted, 1, "activation_2"), -240)
    one, two = evicted.run(views)
    assert one == two != whole[0]
    evicted.run("document.getElementById('linked').click()")
    evicted.wheel(*_place(evicted, 1, "activation_2"), -240)
    one, two = evicted.run(views)
    assert one != two
    evicted.run("document.getElementById('reset').click()")
    assert evicted.run(views) == whole


def test_a_buffer_shows_its_counterpart_and_a_click_keeps_both(evicted: Page) -> None:
    evicted.point(*_place(evicted, 0, "activation_2"))
    tip = evicted.run("return document.getElementById('tip').innerText")
    assert "left the peak; after: activation_2, steps 5 to 7" in tip
    assert evicted.run("return window.memplan.arenas[1].mates.map(i => window.memplan.plans[1].ids[i])") == [
        "activation_2"
    ]
    evicted.point(*_place(evicted, 0, "activation_2"), press=True)
    assert evicted.run("return window.memplan.arenas.map(a => a.pins.length)") == [1, 1]
    assert "before: activation_2, steps 1 to 10" in evicted.run("return document.getElementById('pins').innerText")
    evicted.point(*_place(evicted, 1, "activation_2"), press=True)
    assert evicted.run("return document.getElementById('pins').children.length") == 0


def test_a_module_filters_both_and_the_address_keeps_it(evicted: Page) -> None:
    rows = "return [...document.querySelectorAll('#rows tr')].map(r => r.innerText)"
    before = evicted.run(rows)
    evicted.run("[...document.querySelectorAll('#modules tr')].find(r => r.dataset.module === 'block_b').click()")
    after = evicted.run(rows)
    assert 0 < len(after) < len(before)
    assert all("block_b" in row for row in after)
    evicted.wait("return location.hash.includes('module=block_b')")
    evicted.run("document.getElementById('clear').click()")
    assert evicted.run(rows) == before
    evicted.wait("return location.hash === ''")
    evicted.run("location.hash = 'module=block_b'")
    evicted.wait("return window.memplan.looks[1].module")
    assert evicted.run(rows) == after
