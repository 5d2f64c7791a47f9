"""Devices and their memory, and the search for the largest batch."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.gpus import GPUS
from memplan.errors import InvalidSize, UnsupportedDevice
from memplan.evict.costs import DEVICES
from memplan.planning.capacity import ALLOWANCE, capacity_of
from memplan.trace.batches import largest_within


def test_devices_have_memory_costs_and_an_allowance() -> None:
    for name, total in {**{gpu.name: gpu.memory for gpu in GPUS.values()}, "sm90:40GiB": 40 << 30}.items():
        found = capacity_of(name)
        assert (found.total, found.allowance, found.slack) == (total, ALLOWANCE, int(total * 0.05))
        assert found.usable == total - ALLOWANCE - found.slack
        assert found.costs in DEVICES
        assert not found.is_host
    assert capacity_of("4090") == replace(capacity_of("rtx4090"), device="4090")
    own = capacity_of("cpu", allowance=0, slack=0)
    assert own.is_host
    assert own.usable == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


@pytest.mark.parametrize(("slack", "free"), [("5%", 51), (0.05, 51), (10, 10), ("0%", 0), (0, 0), ("1KiB", None)])
def test_a_size_is_the_steps_but_for_the_slack(slack: float | str, free: int | None) -> None:
    if free is None:
        with pytest.raises(InvalidSize, match="nothing is left"):
            capacity_of(1024, slack=slack)
    else:
        assert capacity_of("1KiB", slack=slack).usable == 1024 - free
        assert capacity_of(1024, slack=slack, allowance="24B").usable == 1000 - free


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"device": "h1000"}, UnsupportedDevice, "did you mean 'h100'.*24GiB"),
        ({"device": ""}, UnsupportedDevice, "24GiB"),
        ({"device": "24GB of"}, InvalidSize, "device"),
        ({"device": -1}, InvalidSize, "device"),
        ({"device": 2.5}, InvalidSize, "device"),
        ({"device": "h100", "slack": "105%"}, InvalidSize, "slack"),
        ({"device": "h100", "slack": -0.5}, InvalidSize, "slack"),
        ({"device": "h100", "slack": 1.0}, InvalidSize, "slack"),
        ({"device": "h100", "allowance": "some"}, InvalidSize, "allowance"),
        ({"device": "l4", "allowance": "22GiB"}, InvalidSize, "nothing is left"),
    ],
)
def test_bad_devices(arguments: dict[str, object], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        capacity_of(**arguments)  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(0, 50), st.integers(0, 10_000), st.integers(1, 300))
def test_the_largest_size_is_found_where_needs_rise(fixed: int, slope: int, limit: int, highest: int) -> None:
    tried: list[int] = []

    def over(size: int) -> int:
        tried.append(size)
        return fixed + slope * size + size // 7 * 3 - limit

    right = [size for size in range(1, highest + 1) if over(size) <= 0]
    tried.clear()
    if right:
        assert largest_within(over, limit, lowest=1, highest=highest) == max(right)
        assert len(tried) <= 30
