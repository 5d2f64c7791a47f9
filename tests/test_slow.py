"""Which combinations of parameters the fast tests keep."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from tests.slow import covering

pytest_plugins = ("pytester",)

LISTS = ("abcdefg", "ABC", "01")


def test_each_value_is_kept_in_as_few_cases_as_can_be_and_none_more_often_than_needed() -> None:
    cases = [set(case) for case in product(*LISTS)]
    kept = [cases[k] for k in covering(cases)]
    assert len(kept) == len(LISTS[0])
    for values in LISTS:
        counts = [sum(value in case for case in kept) for value in values]
        assert min(counts) >= 1
        assert max(counts) - min(counts) <= 1


@pytest.mark.parametrize(
    ("lists", "kept"),
    [
        ([("one", "[1, 2, 3]")], ["1", "2", "3"]),
        ([("one", "[1, 2, 3]"), ("two", "['a', 'b']")], ["1-a", "2-b", "3-a"]),
        ([("one, two", "[(1, 'a'), (1, 'b'), (2, 'a'), (2, 'b')]")], ["1-a", "1-b", "2-a", "2-b"]),
        ([("one", "[1, pytest.param(2, marks=pytest.mark.slow)]"), ("two", "['a', 'b']")], ["1-a", "1-b"]),
        ([], [""]),
    ],
)
def test_what_is_not_slow(lists: list[tuple[str, str]], kept: list[str], pytester: Any) -> None:
    marks = "".join(f"@pytest.mark.parametrize({names!r}, {values})\n" for names, values in reversed(lists))
    names = ", ".join(names for names, _ in lists)
    pytester.makepyfile(f"import pytest\n\n{marks}def test_it({names}):\n    pass\n")
    pytester.makeini("[pytest]\nmarkers =\n    slow: x\n")
    items = pytester.getitems(pytester.path.joinpath("test_what_is_not_slow.py").read_text())
    from tests.slow import mark_repetitions

    mark_repetitions(items)
    fast = [item.name.removeprefix("test_it").strip("[]") for item in items if not item.get_closest_marker("slow")]
    assert fast == kept
