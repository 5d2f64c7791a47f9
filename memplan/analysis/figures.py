"""The figures of a plan that checks and baselines compare, with the rows of buffers that explain a growth."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from memplan.analysis.groups import Group, grouped
from memplan.analysis.holders import alive_at
from memplan.core.plan import Plan


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a plan, in bytes.

    `outside` is everything that the total adds to the arena, `parts` the same by kind (each at its own maximum, so
    their sum may be larger); `peak` are the rows of buffers alive at the peak.
    """

    arena: int
    max_live: int
    outside: int
    parts: Mapping[str, int]
    peak: tuple[Group, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))

    @property
    def total(self) -> int:
        """The bytes that the device must hold."""
        return self.arena + self.outside

    @property
    def lost(self) -> int:
        """Bytes of the arena that no buffer can use at the peak."""
        return self.arena - self.max_live

    @property
    def fragmentation(self) -> Fraction:
        """1 - max_live / arena, as an exact fraction."""
        return Fraction(self.lost, self.arena) if self.arena else Fraction(0)


def figures_of(plan: Plan) -> Figures:
    """Return the figures of `plan`."""
    return Figures(
        arena=plan.arena_size,
        max_live=plan.max_live,
        outside=plan.total - plan.arena_size,
        parts={name: size for name, size in plan.outside.items() if size},
        peak=grouped(alive_at(plan, plan.problem.peak_step)),
    )
