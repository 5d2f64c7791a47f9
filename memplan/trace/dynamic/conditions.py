"""Conditions on the symbols of a trace: which are redundant, which fix a symbol, and which shapes they exclude."""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence

from memplan.symbolic.expression import holder
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
