"""Buffers that play the same role, taken together: the same op in the same place of every layer, one row.

"h.0.mlp.act" and "h.11.mlp.act" are both "h.*.mlp.act". Two versions of a model, or two of its plans, are
compared by these rows, because names of single buffers change when anything before them does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from memplan.analysis.holders import Holder

_LAYER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")

Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """`count` buffers of `bytes` together; `source` is the line of the first one that knows its own.

    `module` is a path in which every layer number is a star, `op` what made the buffers.
    """

    module: str
    op: str
    kind: str
    source: str
    count: int
    bytes: int

    @property
    def key(self) -> Key:
        """What makes it the same row in another plan; lines of source move too easily."""
        return self.module, self.op, self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """A row before and after; a side that has no such row counts 0 buffers of 0 bytes."""

    module: str
    op: str
    kind: str
    source: str
    count_before: int
    count_after: int
    bytes_before: int
    bytes_after: int

    @property
    def delta(self) -> int:
        """Bytes gained; negative when fewer are needed now."""
        return self.bytes_after - self.bytes_before


def pattern(module: str) -> str:
    """A module path without its layer numbers: "h.3.attn" is "h.*.attn", "layers[3].norm" is "layers[*].norm"."""
    return _LAYER.sub("*", module)


def key_of(holder: Holder) -> Key:
    """The row that `holder` belongs to."""
    return pattern(holder.module), holder.op, holder.kind


def grouped(holders: Iterable[Holder]) -> tuple[Group, ...]:
    """Rows with the most bytes first; ties by their names, so that equal plans give equal rows."""
    rows: dict[Key, list[Holder]] = {}
    for holder in holders:
        rows.setdefault(key_of(holder), []).append(holder)
    groups = (
        Group(
            module=key[0],
            op=key[1],
            kind=key[2],
            source=next((h.source for h in members if h.source), ""),
            count=len(members),
            bytes=sum(h.size for h in members),
        )
        for key, members in rows.items()
    )
    return tuple(sorted(groups, key=lambda g: (-g.bytes, g.key)))


def growths(before: Iterable[Group], after: Iterable[Group]) -> tuple[Growth, ...]:
    """The rows that differ, the largest gain first, the largest loss last. Their deltas add up to the difference."""
    old, new = {g.key: g for g in before}, {g.key: g for g in after}
    changed = []
    for key in {**new, **old}:
        a, b = old.get(key), new.get(key)
        growth = Growth(
            module=key[0],
            op=key[1],
            kind=key[2],
            source=b.source if b else a.source if a else "",
            count_before=a.count if a else 0,
            count_after=b.count if b else 0,
            bytes_before=a.bytes if a else 0,
            bytes_after=b.bytes if b else 0,
        )
        if growth.delta or growth.count_before != growth.count_after:
            changed.append(growth)
    return tuple(sorted(changed, key=lambda g: (-g.delta, g.module, g.op, g.kind)))
