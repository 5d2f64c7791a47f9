"""Formats and parses sizes in bytes and shares, for all of memplan.

Output uses binary units (KiB, MiB, ...); input may use binary or decimal ones. Rounding must not hide a difference:
code that shows a measured figure next to its limit uses `bytes_apart` or `shares_apart`.
"""

from __future__ import annotations

import re
from fractions import Fraction

from memplan.errors import InvalidSize

_BINARY = ("KiB", "MiB", "GiB", "TiB", "PiB")
_UNITS = {
    "": 1,
    "B": 1,
    **{unit: 1024 ** (i + 1) for i, unit in enumerate(_BINARY)},
    **{unit: 1000 ** (i + 1) for i, unit in enumerate(("kB", "MB", "GB", "TB", "PB"))},
    "KB": 1000,
}
_SIZE = re.compile(r"([0-9]{1,19})(?:\.([0-9]{1,19}))? ?([A-Za-z]*)", re.ASCII)
_SHARE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?(%?)", re.ASCII)
_HIGHEST = 2**63 - 1
_GIBIBYTES = 1024  # bare numbers up to this are taken for GiB in a hint


def format_bytes(count: int) -> str:
    """Return a size in bytes as text with at most four significant digits, "12.35 MiB"; exact below 1 KiB, "512 B"."""
    size, sign = abs(count), "-" if count < 0 else ""
    if size < 1024:
        return f"{sign}{size} B"
    power = min((size.bit_length() - 1) // 10, len(_BINARY))
    return f"{sign}{size / 1024**power:.{2 if size < 100 * 1024**power else 1}f} {_BINARY[power - 1]}"


def format_exact(count: int) -> str:
    """Return a size in bytes as text, rounded and exact: "12.35 MiB (12,949,913 B)"."""
    return f"{count} B" if abs(count) < 1024 else f"{format_bytes(count)} ({count:,} B)"


def format_share(share: float, digits: int = 2) -> str:
    """Return a share as text in percent, "1.25 %". A share that is not zero is never shown as zero."""
    text = f"{share * 100:.{digits}f}"
    if share and not float(text):
        return f"< {10**-digits:.{digits}f} %" if share > 0 else f"> -{10**-digits:.{digits}f} %"
    return f"{text} %"


def bytes_apart(one: int, two: int) -> tuple[str, str]:
    """Two sizes in bytes as texts, which differ whenever the sizes do."""
    texts = format_bytes(one), format_bytes(two)
    return texts if one == two or texts[0] != texts[1] else (format_exact(one), format_exact(two))


def shares_apart(one: float, two: float) -> tuple[str, str]:
    """Two shares as texts in percent, with enough digits to differ whenever the shares do."""
    for digits in range(2, 16):
        texts = format_share(one, digits), format_share(two, digits)
        if one == two or texts[0] != texts[1]:
            return texts
    return f"{one!r}", f"{two!r}"


def parse_size(text: str, *, bare: bool = False) -> int:
    """Return the bytes of a size such as "3GiB", "512 MiB", "1.5GB" or "1048576"; a fraction of a byte is dropped.

    Raises `InvalidSize` for any other text: one with a sign, an exponent or an unknown unit (units are
    case-sensitive), and, unless `bare`, for a number below 1 MiB without a unit, which nobody means as bytes.
    """
    match = _SIZE.fullmatch(text.strip())
    hint = "write a number of bytes or one with a unit: 1048576, 512MiB, 3GiB, 1.5GB"
    if match is None:
        raise InvalidSize(f"{_shown(text)} is not a size in bytes", hint=hint)
    whole, part, unit = match.group(1), match.group(2) or "0", match.group(3)
    if unit not in _UNITS:
        close = next((known for known in _UNITS if known and known.lower() == unit.lower()), None)
        raise InvalidSize(
            f"{_shown(text)} has the unknown unit {unit!r}",
            hint=f"write {close} with exactly these capitals" if close else hint,
        )
    size = int(Fraction(f"{whole}.{part}") * _UNITS[unit])
    if not unit and not bare and 0 < size < 1 << 20:
        number = text.strip()
        guess = f"did you mean {number}GiB? " if size <= _GIBIBYTES else ""
        raise InvalidSize(f"{_shown(text)} has no unit", hint=f"{guess}write {number}B for bytes")
    if size > _HIGHEST:
        raise InvalidSize(f"{_shown(text)} is more than {_HIGHEST} bytes", hint=hint)
    return size


def parse_share(text: str) -> float:
    """Return the share, between 0 and 1, of a text such as "0.02" or "2%". Raises `InvalidSize` for any other text."""
    return float(parse_share_exactly(text))


def parse_share_exactly(text: str) -> Fraction:
    """Return the exact share, between 0 and 1, of a text: "2%" is 1/50. Raises `InvalidSize` as `parse_share` does."""
    match = _SHARE.fullmatch(text.strip())
    share = Fraction(match.group(1)) / (100 if match.group(2) else 1) if match else None
    if share is None or share > 1:
        raise InvalidSize(f"{_shown(text)} is not a share between 0 and 1", hint="write 0.02 or 2%")
    return share


def parse_percent(text: str) -> Fraction:
    """Return the share, 0 or more, of a text such as "2%" or "150 %". Raises `InvalidSize` for any other text."""
    match = _SHARE.fullmatch(text.strip())
    if match is None or not match.group(2):
        raise InvalidSize(f"{_shown(text)} is not a number of percent", hint="write 2% or 0.5%")
    return Fraction(match.group(1)) / 100


def _shown(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")
