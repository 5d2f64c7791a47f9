"""Marks tests that repeat on another model, or with another option, what faster tests show.

`scripts/test.sh` leaves them out; `scripts/test.sh -m slow` runs them, and `scripts/test.sh -m ""` (nightly) all tests.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from typing import Any

import pytest

from benchmarks.zoo import ZOO

FEW = ("mlp", "gpt2", "resnet", "lstm")  # linear layers, attention and tied weights, convolutions, recurrence


def slow(*values: Any) -> Any:
    """The parameters of a slow test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def zoo() -> list[Any]:
    """The names of all models of the zoo; all but a few are slow."""
    return [name if name in FEW else slow(name) for name in ZOO]


def mark_repetitions(items: Iterable[pytest.Item]) -> None:
    """Mark all but a few combinations of the parameters of each test as slow: each value is in one that is not.

    What one `parametrize` lists is a value, also where it is of several parameters.
    """
    combined = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if not item.get_closest_marker("slow"):
            combined[item.nodeid.partition("[")[0]].append(item)
    for cases in combined.values():
        kept = set(covering([_values(case) for case in cases]))
        for k, case in enumerate(cases):
            if k not in kept:
                case.add_marker(pytest.mark.slow)


def covering(cases: Sequence[Set[Hashable]]) -> Iterator[int]:
    """The indices of a few `cases` in which each value of each of them occurs.

    Of those that add as many values, the next is one whose values are in the fewest so far.
    """
    used = Counter[Hashable]()
    missing = {value for case in cases for value in case}

    def rank(k: int) -> tuple[int, int, int]:
        return len(missing & cases[k]), -sum(used[value] for value in cases[k]), -k

    while missing:
        best = max(range(len(cases)), key=rank)
        missing -= cases[best]
        used.update(cases[best])
        yield best


def _values(case: pytest.Item) -> set[Hashable]:
    """The parameters of each `parametrize` of a test, with the objects that they are in this case; or else the test."""
    lists = [mark.args[0] for mark in case.iter_markers("parametrize")]
    names = [(*map(str.strip, one.split(",")),) if isinstance(one, str) else (*one,) for one in lists]
    given: dict[str, Any] = case.callspec.params if hasattr(case, "callspec") else {}
    names += [(name,) for name in given if not any(name in one for one in names)]  # of fixtures
    return {(one, *(id(given[name]) for name in one)) for one in names} or {case.nodeid}
