"""What a case can come to."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Result(StrEnum):
    """The result of a case. A sweep fails for all but PASSED, NO_REFERENCE, and REFUSED and ROUNDED where expected.

    ROUNDED: equal to eager up to rounding, and not aot_eager's bits.
    """

    PASSED = "passed"
    REFUSED = "refused"
    ROUNDED = "rounded otherwise"
    WRONG = "wrong"
    UNTYPED = "untyped"
    TOO_SLOW = "too slow"
    CRASHED = "crashed"
    NO_REFERENCE = "no reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A result, with the reason in words and the CPU seconds that the case took."""

    case: str
    result: Result
    reason: str = ""
    seconds: float = 0.0
