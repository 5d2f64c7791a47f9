"""Checks a plan against limits: which are exceeded, by how much, and which buffers explain it.

A limit ("arena:12GiB", "arena:+2%", "fragmentation:5%", "outside:+0") is a figure, a colon and what it may be. With a
plus sign it is relative to the baseline: a share of it ("+2%") or a number of bytes ("+64MiB") that the figure may grow
by. Fragmentation is a share itself: "fragmentation:+1%" allows one percentage point more than before.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from memplan.analysis.buffers import Holder, alive_at
from memplan.analysis.needs import OPTIMIZER, named_optimizer
from memplan.analysis.rows import Figures, Group, Growth, figures_of, growths
from memplan.core.plan import Plan
from memplan.core.units import (
    bytes_apart,
    format_exact,
    format_share,
    parse_percent,
    parse_share_exactly,
    parse_size,
    shares_apart,
)
from memplan.errors import InvalidSize

EXPLAINED = 5
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One limit and the measured figure, as exact fractions: shares of one if `is_share`, otherwise bytes.

    These fields explain an exceeded limit, largest first: `grown` are the rows that differ from the baseline, which
    add up to the difference; without a baseline, `because` are the buffers alive at the peak, or `parts` the bytes
    outside the arena by kind. `before` is the baseline's value.
    """

    name: str
    measured: Fraction
    limit: Fraction
    is_share: bool
    ok: bool
    rule: str = ""
    before: Fraction | None = None
    because: tuple[Holder, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    grown: tuple[Growth, ...] = ()

    @property
    def excess(self) -> Fraction:
        """The amount above the limit, in the limit's unit; 0 when the limit is kept."""
        return Fraction(0) if self.ok else self.measured - self.limit

    def texts(self) -> tuple[str, str, str]:
        """Return measured, limit and excess as texts: exact bytes, or shares with enough digits to tell them apart."""
        if self.is_share:
            measured, limit = shares_apart(float(self.measured), float(self.limit))
            return measured, limit, "" if self.ok else format_share(float(self.excess))
        # Bytes are whole numbers: a limit of 100.5 bytes is a limit of 100.
        figure, most = int(self.measured), int(self.limit)
        if self.ok:
            return *bytes_apart(figure, most), ""
        return format_exact(figure), format_exact(most), format_exact(figure - most)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of a plan, one per rule, in the order of the rules."""

    model: str
    findings: tuple[Finding, ...]
    figures: Figures
    baseline: Figures | None = None

    @property
    def ok(self) -> bool:
        """Whether every limit is kept."""
        return all(finding.ok for finding in self.findings)

    @property
    def gains(self) -> tuple[tuple[Metric, int, int], ...]:
        """(figure, bytes in the baseline, bytes now) of each figure to which the baseline can be lowered."""
        if self.baseline is None:
            return ()
        pairs = ((m, int(m.of(self.baseline)), int(m.of(self.figures))) for m in (Metric.ARENA, Metric.OUTSIDE))
        return tuple((metric, before, now) for metric, before, now in pairs if now < before)


def check(plan: Plan, rules: Iterable[Rule], baseline: Figures | None = None, *, optimizer: str = OPTIMIZER) -> Verdict:
    """Return the verdict on `plan`: each rule compared exactly, without floats; the total is that with an optimizer.

    Raises `InvalidSize` for a rule that counts from a baseline when none is given.
    """
    rules = tuple(rules)
    for rule in rules:
        if rule.needs_baseline and baseline is None:
            raise InvalidSize(
                f"{rule.text!r} is relative to a baseline, and {plan.model or 'the plan'} has none",
                hint="give --baseline FILE, and write it once with --update-baseline",
            )
    figures = figures_of(plan, optimizer)
    findings = tuple(_finding(plan, figures, baseline, rule) for rule in rules)
    using = f"{Metric.TOTAL} with {named_optimizer(optimizer)}"
    findings = tuple(replace(f, name=using) if figures.state and f.name == Metric.TOTAL else f for f in findings)
    return Verdict(model=plan.model, findings=findings, figures=figures, baseline=baseline)


def _finding(plan: Plan, figures: Figures, baseline: Figures | None, rule: Rule) -> Finding:
    metric, measured, limit = rule.metric, rule.metric.of(figures), rule.limit(baseline)
    before = metric.of(baseline) if baseline is not None else None
    because: tuple[Holder, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    grown: tuple[Growth, ...] = ()
    if measured > limit and baseline is not None and before is not None and measured > before:
        grown = tuple(sorted(_grown(metric, baseline, figures), key=lambda row: -row.delta))
    if measured > limit and not grown and metric is Metric.OUTSIDE:
        parts = tuple(sorted(figures.parts.items(), key=lambda part: -part[1]))
    elif measured > limit and not grown:
        because = alive_at(plan, plan.problem.peak_step, EXPLAINED)
    return Finding(
        name=metric.value,
        measured=measured,
        limit=limit,
        is_share=metric.is_share,
        ok=measured <= limit,
        rule=rule.text,
        before=before,
        because=because,
        parts=parts,
        grown=grown,
    )


def _grown(metric: Metric, before: Figures, after: Figures) -> Iterator[Growth]:
    """Yield the rows that explain the growth of a figure."""
    if metric is not Metric.OUTSIDE:
        yield from growths(before.peak, after.peak)
    if metric in (Metric.ARENA, Metric.TOTAL, Metric.FRAGMENTATION) and before.lost != after.lost:
        yield _row("fragmentation", before.lost, after.lost)
    if metric is Metric.TOTAL and before.state != after.state:
        yield _row("optimizer state", before.state, after.state)
    if metric in (Metric.OUTSIDE, Metric.TOTAL):
        for kind in {**after.parts, **before.parts}:
            old, new = before.parts.get(kind, 0), after.parts.get(kind, 0)
            if old != new:
                yield _row(kind, old, new)


def _row(kind: str, before: int, after: int) -> Growth:
    """Return a row of bytes that are not buffers of the arena."""
    sides = (Group(module="", op="", kind=kind, source="", count=0, bytes=size) for size in (before, after))
    return Growth.of(("", "", kind), *sides)
