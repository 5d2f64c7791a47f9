"""Conditions of a symbolic trace: what they say is told without trying every size of a dimension without bounds."""

from __future__ import annotations

import tracemalloc

from memplan.trace.dynamic.dims import Range
from memplan.trace.dynamic.symbols import without_implied


def _range(name: str, most: int) -> Range:
    return Range(name=name, min=1, max=most, example=5, strict=False)


def test_only_conditions_that_say_something_are_kept() -> None:
    assert without_implied([_range("a", 9)], ["a >= 1", "a > 2", "a >= 2", "a % (a - 3) == 0"]) == (
        "a > 2",
        "a % (a - 3) == 0",
    )


def test_wide_ranges_are_not_laid_out_in_memory() -> None:
    wide = [_range("a", 2**20), _range("b", 2**20)]
    tracemalloc.start()
    try:
        kept = without_implied(wide, ["a >= 2", "a*b > 7"])
        assert tracemalloc.get_traced_memory()[1] < 2**20, "bytes"
    finally:
        tracemalloc.stop()
    assert kept == ("a >= 2", "a*b > 7")
