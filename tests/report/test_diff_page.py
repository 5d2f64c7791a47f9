"""The page of two plans in a real browser: its counts, and changes by module."""

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
