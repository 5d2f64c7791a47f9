"""Sizes and shares as text, and work that is logged because it takes long."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.units import (
    bytes_apart,
    format_bytes,
    format_exact,
    format_share,
    parse_share,
    parse_size,
    shares_apart,
)
from memplan.errors import InvalidSize

_SIZES = (
    ("1048576", 2**20), ("3GiB", 3 * 2**30), ("512 MiB", 512 * 2**20), ("1.5GB", 1_500_000_000), ("0", 0),
    (" 7 B ", 7), ("2kB", 2000), ("2KB", 2000), ("2KiB", 2048), ("0.1KiB", 102), ("1TiB", 2**40),
)  # fmt: skip


@pytest.mark.parametrize(("text", "size"), _SIZES)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


_NO_SIZES = (
    "", "GiB", "-1", "+1", "1e9", "1_000", "1,000", "3gib", "3 Gb", "3GiBs", "1.GiB", ".5GiB", "nan", "inf", "\u0663",
    "9999999999PiB", "0x10", "3  GiB", "3\nGiB",
)  # fmt: skip


@pytest.mark.parametrize("text", _NO_SIZES)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_size(text)


def test_a_unit_in_other_capitals_is_suggested() -> None:
    with pytest.raises(InvalidSize, match="write GiB with exactly these capitals"):
        parse_size("3gib")


@given(st.text(max_size=12))
def test_any_text_is_a_size_or_a_typed_error(text: str) -> None:
    for parse in (parse_size, parse_share):
        with contextlib.suppress(InvalidSize):
            assert parse(text) >= 0


@pytest.mark.parametrize(("text", "share"), [("0.02", 0.02), ("2%", 0.02), ("2 %", 0.02), ("0", 0.0), ("1", 1.0)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == share


@pytest.mark.parametrize("text", ["", "2", "-0.1", "101%", "nan", "0.1.2", "%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(InvalidSize):
        parse_share(text)


def test_bytes_read_well() -> None:
    assert format_bytes(0) == "0 B"
    assert format_bytes(1023) == "1023 B"
    assert format_bytes(1024) == "1.00 KiB"
    assert format_bytes(3 * 2**30) == "3.00 GiB"
    assert format_bytes(-2048) == "-2.00 KiB"
    assert format_exact(12_949_913) == "12.35 MiB (12,949,913 B)"


def test_what_is_not_zero_never_reads_as_zero() -> None:
    assert format_share(0.0) == "0.00 %"
    assert format_share(1e-9) == "< 0.01 %"
    assert format_share(-1e-9) == "> -0.01 %"


@given(st.integers(0, 2**62), st.integers(0, 2**62))
def test_different_sizes_read_as_different(one: int, two: int) -> None:
    texts = bytes_apart(one, two)
    assert (texts[0] == texts[1]) == (one == two)
    assert len(set(bytes_apart(one, one + 1))) == 2


@given(st.floats(0, 1), st.floats(0, 1))
def test_different_shares_read_as_different(one: float, two: float) -> None:
    texts = shares_apart(one, two)
    assert (texts[0] == texts[1]) == (one == two)


@given(st.integers(0, 2**62))
def test_what_is_shown_is_within_one_percent(size: int) -> None:
    assert abs(parse_size(format_bytes(size)) - size) <= size * 0.01 + 1
