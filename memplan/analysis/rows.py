"""Rows of buffers of repeated layers: same op, same kind, same module apart from layer numbers; and a plan's figures.

"h.0.mlp.act" and "h.11.mlp.act" are both "h.*.mlp.act". Two versions of a model, or two of its plans, are
compared by these rows, because names of single buffers change when anything before them does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType

from memplan.analysis.buffers import Holder, alive_at
from memplan.analysis.needs import OPTIMIZER, state_beside
from memplan.core.plan import Plan

_LAYER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """A row of `count` buffers with `bytes` bytes in total.

    `module` is a path in which every layer number is a star, `op` the op that writes the buffers, `source` the first
    known source line among them.
    """

    module: str
    op: str
    kind: str
    source: str
    count: int
    bytes: int

    @property
    def key(self) -> Key:
        """The fields that identify the row in another plan; source lines change too easily."""
        return self.module, self.op, self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A row before and after; where one side has no such row, it counts 0 buffers of 0 bytes."""

    module: str
    op: str
    kind: str
    source: str
    count_before: int
    count_after: int
    bytes_before: int
    bytes_after: int

    @classmethod
    def of(cls, key: Key, before: Group | None, after: Group | None) -> Growth:
        """Return the growth of the row with this key."""
        module, op, kind = key
        a, b = (g or Group(module=module, op=op, kind=kind, source="", count=0, bytes=0) for g in (before, after))
        sizes = {"bytes_before": a.bytes, "bytes_after": b.bytes, "count_before": a.count, "count_after": b.count}
        return cls(module=module, op=op, kind=kind, source=b.source if after else a.source, **sizes)

    @property
    def delta(self) -> int:
        """Bytes added; negative if the row is smaller now."""
        return self.bytes_after - self.bytes_before


def pattern(module: str) -> str:
    """Return a module path without layer numbers: "h.*.attn" for "h.3.attn", "layers[*].norm" for "layers[3].norm"."""
    return _LAYER.sub("*", module)


def key_of(holder: Holder) -> Key:
    """Return the key of the row that `holder` belongs to."""
    return pattern(holder.module), holder.op, holder.kind


def grouped(holders: Iterable[Holder]) -> tuple[Group, ...]:
    """Return the rows of `holders`, most bytes first; ties are ordered by name, so that equal plans give equal rows."""
    rows: dict[Key, list[Holder]] = {}
    for holder in holders:
        rows.setdefault(key_of(holder), []).append(holder)
    groups = []
    for (module, op, kind), members in rows.items():
        source, total = next((h.source for h in members if h.source), ""), sum(h.size for h in members)
        groups.append(Group(module=module, op=op, kind=kind, source=source, count=len(members), bytes=total))
    return tuple(sorted(groups, key=lambda g: (-g.bytes, g.key)))


def growths(before: Iterable[Group], after: Iterable[Group]) -> tuple[Growth, ...]:
    """Return the rows that differ, the largest growth first. Their deltas add up to the difference of the totals."""
    old, new = {g.key: g for g in before}, {g.key: g for g in after}
    found = (Growth.of(key, old.get(key), new.get(key)) for key in {**new, **old})
    changed = (g for g in found if g.delta or g.count_before != g.count_after)
    return tuple(sorted(changed, key=lambda g: (-g.delta, g.module, g.op, g.kind)))


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The figures of a plan that checks and baselines compare, in bytes.

    `outside` is everything that the total of the plan adds to the arena, `parts` the same by kind (each at its own
    maximum, so their sum may be larger); `peak` are the rows of buffers alive at the peak, which explain a growth;
    `state` is what an optimizer keeps beside the plan.
    """

    arena: int
    max_live: int
    outside: int
    parts: Mapping[str, int]
    peak: tuple[Group, ...]
    state: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", MappingProxyType(dict(self.parts)))

    @property
    def total(self) -> int:
        """The bytes that the device must hold."""
        return self.arena + self.outside + self.state

    @property
    def lost(self) -> int:
        """Bytes of the arena that no buffer can use at the peak."""
        return self.arena - self.max_live

    @property
    def fragmentation(self) -> Fraction:
        """1 - max_live / arena, as an exact fraction."""
        return Fraction(self.lost, self.arena) if self.arena else Fraction(0)


def figures_of(plan: Plan, optimizer: str = OPTIMIZER) -> Figures:
    """Return the figures of `plan`, with what an optimizer keeps of a training step that has no update of its own."""
    parts, peak = {name: size for name, size in plan.outside.items() if size}, plan.problem.peak_step
    sizes = {"arena": plan.arena_size, "max_live": plan.max_live, "outside": plan.total - plan.arena_size}
    return Figures(**sizes, parts=parts, peak=grouped(alive_at(plan, peak)), state=state_beside(plan, optimizer))
