"""Groups the buffers of repeated layers into rows: same op, same kind, same module apart from layer numbers.

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
    """Return the rows that differ, the largest growth first. Their deltas add up to the difference of the totals."""
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
