"""Finds the largest size of a batch that fits, where a larger one is assumed to need no less memory."""

from __future__ import annotations

from collections.abc import Callable

_SECANTS = 12  # sizes that are guessed from the needs of others; then the range is halved


def largest_within(over: Callable[[int], int], limit: int, *, lowest: int, highest: int) -> int:
    """Return the largest size from `lowest` to `highest` that fits; `lowest` is known to fit.

    Args:
        over: The bytes by which a size exceeds the limit; 0 or negative where it fits.
        limit: The limit in bytes, from which the first guess is made.
        lowest: The smallest size.
        highest: The largest size.

    Example:
        >>> largest_within(lambda batch: 100 + 10 * batch - 1000, 1000, lowest=1, highest=4096)
        90
    """
    known: dict[int, int] = {lowest: over(lowest)}
    fits, fails = lowest, highest + 1
    while fails - fits > 1:
        guess = min(max(_guess(known, limit, fits, fails), fits + 1), fails - 1)
        known[guess] = over(guess)
        fits, fails = (fits, guess) if known[guess] > 0 else (guess, fails)
    return fits


def _guess(known: dict[int, int], limit: int, fits: int, fails: int) -> int:
    """Return the size whose need should meet the limit: needs are nearly affine in the size of the batch."""
    if len(known) == 1:
        return fits * max(limit // max(limit + known[fits], 1), 2)
    if len(known) > _SECANTS:
        return (fits + fails) // 2
    largest = sorted(known)
    one, two = largest[-2:] if fails > largest[-1] else (fits, fails)
    slope = (known[two] - known[one]) / (two - one)
    return one + int(-known[one] / slope) if slope > 0 else 2 * two
