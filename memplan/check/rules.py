"""Parses the limits of `--fail-over`: "arena:12GiB", "arena:+2%", "fragmentation:5%", "outside:+0".

A rule is a figure, a colon and its limit. With a plus sign the limit is relative to the baseline: a share of it ("+2%")
or a number of bytes ("+64MiB") that the figure may grow by. Fragmentation is a share itself: "fragmentation:5%" is a
limit, "fragmentation:+1%" allows one percentage point more than before.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction

from memplan.analysis.rows import Figures
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
        """Whether the figure is a share of one instead of bytes."""
        return self is Metric.FRAGMENTATION

    def of(self, figures: Figures) -> Fraction:
        """Return the figure's exact value: bytes or a share."""
        return Fraction(figures.max_live if self is Metric.PEAK else getattr(figures, self.value))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A limit on one figure: `times` its baseline plus `amount`, in bytes or a share; `text`: as it was written."""

    metric: Metric
    times: Fraction
    amount: Fraction
    text: str

    @property
    def needs_baseline(self) -> bool:
        return self.times != 0

    def limit(self, baseline: Figures | None) -> Fraction:
        """Return the highest value within the limit, exactly. `baseline` may be None unless it is needed."""
        return self.amount + (self.times * self.metric.of(baseline) if baseline is not None else 0)


def parse_rule(text: str) -> Rule:
    """Return the rule that `text` describes. Raises `InvalidSize`, whose hint shows how rules are written."""
    name, colon, amount = text.strip().partition(":")
    try:
        metric = Metric(name.strip())
    except ValueError:
        raise InvalidSize(f"{text!r} limits none of {', '.join(Metric)}", hint=_FORM) from None
    amount = amount.strip()
    if not colon or not amount:
        raise InvalidSize(f"{text!r} has no limit", hint=_FORM)
    times, value = Fraction(amount.startswith("+")), Fraction(0)
    amount = amount.removeprefix("+").strip()
    if metric.is_share:
        value = parse_share_exactly(amount)
    elif times and amount.endswith("%"):
        times += parse_percent(amount)
    else:
        value = Fraction(parse_size(amount))
    return Rule(metric=metric, times=times, amount=value, text=text.strip())


NOTHING_GROWS = tuple(map(parse_rule, ("arena:+0", "outside:+0")))
"""The rules for a baseline when no others are given."""
