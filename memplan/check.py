"""A plan against limits: which were exceeded, by how much, and which buffers explain it. Pure, torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from memplan.errors import InvalidSize
from memplan.holders import Holder, alive_at
from memplan.plan import Plan
from memplan.units import bytes_apart, format_exact, format_share, shares_apart

EXPLAINED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a plan must keep; None is no limit.

    `max_arena` and `max_outside` are bytes (outside: everything that `Plan.total` adds to the arena),
    `max_fragmentation` is a share between 0 and 1. A figure equal to its limit keeps it.
    """

    max_arena: int | None = None
    max_fragmentation: float | None = None
    max_outside: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_arena", "max_outside"):
            size = getattr(self, name)
            if size is not None and size < 0:
                raise InvalidSize(f"{size} is negative", where=name, hint="give a number of bytes")
        share = self.max_fragmentation
        if share is not None and not 0 <= share <= 1:
            raise InvalidSize(f"{share} is not between 0 and 1", where="max_fragmentation", hint="write 0.02 for 2 %")

    @property
    def is_empty(self) -> bool:
        return self.max_arena is None and self.max_fragmentation is None and self.max_outside is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One limit and what was measured. `is_share`: both are shares of one, otherwise bytes.

    `because` are the buffers alive at the peak that explain an exceeded limit, largest first; `parts` the
    bytes by kind that explain what lies outside.
    """

    name: str
    measured: float
    limit: float
    is_share: bool
    ok: bool
    because: tuple[Holder, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()

    @property
    def excess(self) -> float:
        """How much above the limit, in its unit; 0 when the limit is kept."""
        return 0 if self.ok else self.measured - self.limit

    def texts(self) -> tuple[str, str, str]:
        """Measured, limit and excess for reading: exact bytes, shares with the digits that tell them apart."""
        if self.is_share:
            measured, limit = shares_apart(self.measured, self.limit)
            return measured, limit, "" if self.ok else format_share(self.excess)
        if self.ok:
            return *bytes_apart(int(self.measured), int(self.limit)), ""
        return format_exact(int(self.measured)), format_exact(int(self.limit)), format_exact(int(self.excess))


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The findings of a plan, one per limit given, in the order of `Limits`."""

    model: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Every limit is kept."""
        return all(finding.ok for finding in self.findings)


def check(plan: Plan, limits: Limits) -> Verdict:
    """Compare exactly (no float comes between a figure and its limit); never raises on a valid plan."""
    findings = []
    if limits.max_arena is not None:
        findings.append(_arena(plan, limits.max_arena))
    if limits.max_fragmentation is not None:
        findings.append(_fragmentation(plan, limits.max_fragmentation))
    if limits.max_outside is not None:
        findings.append(_outside(plan, limits.max_outside))
    return Verdict(model=plan.model, findings=tuple(findings))


def _arena(plan: Plan, limit: int) -> Finding:
    ok = plan.arena_size <= limit
    return Finding(
        name="arena", measured=plan.arena_size, limit=limit, is_share=False, ok=ok, because=_because(plan, ok)
    )


def _fragmentation(plan: Plan, limit: float) -> Finding:
    # 0.02 as it was written, not as the nearest binary fraction: 98 of 100 bytes keep a limit of 2 %.
    ok = plan.arena_size - plan.max_live <= Fraction(repr(float(limit))) * plan.arena_size
    return Finding(
        name="fragmentation",
        measured=plan.fragmentation,
        limit=limit,
        is_share=True,
        ok=ok,
        because=_because(plan, ok),
    )


def _outside(plan: Plan, limit: int) -> Finding:
    measured = plan.total - plan.arena_size
    ok = measured <= limit
    parts = sorted(((name, size) for name, size in plan.outside.items() if size), key=lambda part: -part[1])
    return Finding(
        name="outside", measured=measured, limit=limit, is_share=False, ok=ok, parts=() if ok else tuple(parts)
    )


def _because(plan: Plan, ok: bool) -> tuple[Holder, ...]:
    return () if ok else alive_at(plan, plan.problem.peak_step, EXPLAINED)
