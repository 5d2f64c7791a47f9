"""The grammar of `--fail-over`, and the exact limits that it means."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.analysis.rows import Figures
from memplan.check.check import Metric, parse_rule
from memplan.errors import InvalidSize

BEFORE = Figures(arena=200, max_live=150, outside=70, parts={}, peak=())


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("arena:12GiB", 12 * 2**30),
        ("arena:+2%", 204),
        ("arena:+0.25 %", Fraction(401, 2)),
        ("arena:+150%", 500),
        ("arena:+1KiB", 1224),
        ("arena:+0", 200),
        ("peak:+0", 150),
        ("outside:+0", 70),
        ("total:+30B", 300),
        ("fragmentation:5%", Fraction(1, 20)),
        ("fragmentation:0.05", Fraction(1, 20)),
        ("fragmentation:+1%", Fraction(26, 100)),
        (" arena : 1 KiB ", 1024),
    ],
)
def test_what_a_rule_allows(text: str, limit: Fraction) -> None:
    rule = parse_rule(text)
    assert rule.limit(BEFORE) == limit
    assert rule.needs_baseline == ("+" in text)


@pytest.mark.parametrize(
    "text",
    ["", "arena", "arena:", "arena:+", "memory:3", "arena:-1", "arena:5%", "arena:++1", "arena:3gib", "fragmentation:2",
     "fragmentation:+200%", "outside:+x%", "arena:1e3", ":3", "arena:+-1%"],
)  # fmt: skip
def test_what_is_no_rule_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_rule(text)


@given(st.text(max_size=20))
def test_any_text_is_a_rule_or_refused(text: str) -> None:
    for prefix in ("", "arena:", "fragmentation:+"):
        with contextlib.suppress(InvalidSize):
            assert parse_rule(prefix + text).metric in Metric
