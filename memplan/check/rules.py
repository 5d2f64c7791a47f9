"""What `--fail-over` says: "arena:12GiB", "arena:+2%", "fragmentation:5%", "outside:+0".

A figure, a colon, and the most that it may be. With a plus sign it is the most that it may grow beyond the
baseline: by a share of it ("+2%") or by bytes ("+64MiB"). Fragmentation is a share itself: "fragmentation:5%"
is a limit, "fragmentation:+1%" allows one percent point more than before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction

from memplan.analysis.figures import Figures
from memplan.core.units import parse_percent, parse_share_exactly, parse_size
from memplan.errors import InvalidSize

_FORM = "write FIGURE:LIMIT, as arena:12GiB, arena:+2%, fragmentation:5% or outside:+0"


class Metric(enum.StrEnum):
    """The figures that can be limited."""

    ARENA = "arena"
    PEAK = "peak"
    FRAGMENTATION = "fragmentation"
    OUTSIDE = "outside"
    TOTAL = "total"

    @property
    def is_share(self) -> bool:
        """A share of one instead of bytes."""
        return self is Metric.FRAGMENTATION

    def of(self, figures: Figures) -> Fraction:
        """Its value, exactly: bytes or a share."""
        if self is Metric.FRAGMENTATION:
            return figures.fragmentation
        names = {Metric.ARENA: "arena", Metric.PEAK: "max_live", Metric.OUTSIDE: "outside", Metric.TOTAL: "total"}
        return Fraction(getattr(figures, names[self]))


class Against(enum.StrEnum):
    """What a rule's amount counts from."""

    ZERO = "zero"
    BASELINE = "baseline"
    SHARE_OF_BASELINE = "share of baseline"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`amount` is in bytes or a share of one; `text` is how the rule was written."""

    metric: Metric
    against: Against
    amount: Fraction
    text: str

    @property
    def needs_baseline(self) -> bool:
        return self.against is not Against.ZERO

    def limit(self, baseline: Figures | None) -> Fraction:
        """The highest value that keeps the rule, exactly. `baseline` may be None unless it is needed."""
        if baseline is None or self.against is Against.ZERO:
            return self.amount
        before = self.metric.of(baseline)
        return before + (before * self.amount if self.against is Against.SHARE_OF_BASELINE else self.amount)


def parse_rule(text: str) -> Rule:
    """A rule from its text. Raises `InvalidSize` that says how rules are written."""
    name, colon, amount = text.strip().partition(":")
    try:
        metric = Metric(name.strip())
    except ValueError:
        known = ", ".join(Metric)
        raise InvalidSize(f"{text!r} limits none of {known}", hint=_FORM) from None
    amount = amount.strip()
    if not colon or not amount:
        raise InvalidSize(f"{text!r} has no limit", hint=_FORM)
    grows = amount.startswith("+")
    amount = amount.removeprefix("+").strip()
    against = Against.BASELINE if grows else Against.ZERO
    if metric.is_share:
        value = parse_share_exactly(amount)
    elif grows and amount.endswith("%"):
        against, value = Against.SHARE_OF_BASELINE, parse_percent(amount)
    else:
        value = Fraction(parse_size(amount))
    return Rule(metric=metric, against=against, amount=value, text=text.strip())


NOTHING_GROWS = tuple(map(parse_rule, ("arena:+0", "outside:+0")))
"""What a baseline means when nothing else is said."""
