"""Conditions on the symbols of a trace: which are redundant, which fix a symbol, and which shapes they exclude."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from memplan.symbolic.sizes import holder
from memplan.trace.dynamic.dims import Range

_FEW = 20_000  # the most shapes that are tried one by one
_NEAR = 40  # sizes below and above the hint that are tried to see whether a symbol is fixed


def fixed_symbol(
    symbols: Sequence[Range], hints: Mapping[str, int], conditions: Sequence[str]
) -> tuple[Range, str] | None:
    """Return the first symbol with only one value left near the hints, and the condition that fixes it; else None."""
    names = [s.name for s in symbols]
    for s in symbols:
        tried = range(max(s.min, hints[s.name] - _NEAR), min(s.max, hints[s.name] + _NEAR) + 1)
        for text in conditions:
            holds = holder([text], names)
            left = sum(bool(holds(*({**hints, s.name: n}[name] for name in names))[0]) for n in tried)
            if left <= 1 < len(tried):
                return s, text
    return None


def without_implied(symbols: Sequence[Range], conditions: Sequence[str]) -> tuple[str, ...]:
    """Return the conditions that are not implied by the ones before, as far as all shapes can be tried."""
    kept: list[str] = []
    for text in sorted(dict.fromkeys(conditions), key=lambda text: (len(text), text)):
        used = [s for s in symbols if s.name in _names(text)]
        names = [s.name for s in used]
        shapes = math.prod(s.max - s.min + 1 for s in used)
        known = holder([other for other in kept if _names(other) <= set(names)], names)
        holds = holder([text], names)
        if shapes > _FEW or any(all(known(*values)) and not holds(*values)[0] for values in _every(used)):
            kept.append(text)
    return tuple(kept)


def _every(symbols: Sequence[Range]) -> Iterator[tuple[int, ...]]:
    """Yield all values of the symbols. The ranges are laid out in memory, so this is for few shapes only."""
    return itertools.product(*(range(s.min, s.max + 1) for s in symbols))


def _names(text: str) -> set[str]:
    """Return the names in a condition."""
    return {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}


def nearest_excluded(
    symbols: Sequence[Range], hints: Mapping[str, int], conditions: Sequence[str]
) -> dict[str, int] | None:
    """Return the hints with one value that the conditions exclude, the nearest that is no special size; else None."""
    names = [s.name for s in symbols]
    holds = holder(conditions, names)
    for s in symbols:
        near = list(range(max(s.min, 3, hints[s.name] - _FEW), min(s.max, hints[s.name] + _FEW) + 1))
        near.sort(key=lambda n, middle=hints[s.name]: abs(n - middle))  # type: ignore[misc]
        for n in near:
            values = {**hints, s.name: n}
            if not all(holds(*(values[name] for name in names))):
                return values
    return None


def disjunction(symbols: Sequence[Range], one: Sequence[str], two: Sequence[str]) -> tuple[str, ...]:
    """Return conditions that hold where all of `one` or all of `two` hold."""
    if not one or not two:
        return ()
    whole = " or ".join(f"({' and '.join(texts)})" for texts in (one, two))
    names = [s.name for s in symbols]
    shapes = math.prod(s.max - s.min + 1 for s in symbols)
    simple: list[str] = []
    if shapes <= _FEW:
        check = holder([whole, *one, *two], names)
        found = [check(*values) for values in _every(symbols)]
        implied = [all(row[i + 1] for row in found if row[0]) for i in range(len(one) + len(two))]
        simple = [text for text, follows in zip((*one, *two), implied, strict=True) if follows]
    return without_implied(symbols, [*simple, whole])
