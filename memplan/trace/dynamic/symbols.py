"""Translate torch's symbols to the user's.

Sizes of a trace become expressions of these symbols, and guards become conditions on them.
"""

from __future__ import annotations

import ast
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.functions import Max
from torch.utils._sympy.printers import PythonPrinter
from torch.utils._sympy.value_ranges import ValueRanges, bound_sympy

from memplan.errors import InvalidPlan, UnsupportedGraph
from memplan.symbolic.sizes import Expression, holder
from memplan.trace.dynamic.dims import Range, Varying

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


class Translator:
    """Records what each of torch's symbols stands for, and writes sizes as text. `symbols` are the user's."""

    def __init__(self, env: ShapeEnv, symbols: Sequence[Range]) -> None:
        self.env = env
        self.names = [s.name for s in symbols]
        self._user = {s.name: sympy.Symbol(s.name, integer=True, positive=True) for s in symbols}
        self._ranges = {self._user[s.name]: ValueRanges(max(s.min, 2), max(s.max, 2)) for s in symbols}
        self._bounds = {s.name: s for s in symbols}
        self._meaning: dict[sympy.Symbol, sympy.Expr] = {}
        self._texts: dict[sympy.Expr, str] = {}
        self._expressions: dict[sympy.Expr, sympy.Expr] = {}
        self._reasons: dict[str, str] = {}

    def bind(self, symbol: Any, varying: Varying) -> None:
        """Record that `symbol` is the size of a dimension that varies, or one of the user's symbols."""
        if isinstance(symbol, sympy.Symbol):
            self._meaning[symbol] = varying.factor * self._user[varying.symbol] + varying.offset

    # -- sizes -------------------------------------------------------------------------------------------

    def expression(self, size: Any) -> sympy.Expr:
        """Return a size as an expression of the user's symbols."""
        if not isinstance(size, torch.SymInt):
            return sympy.Integer(int(size))
        raw = size.node.expr
        if raw not in self._expressions:
            self._expressions[raw] = self._translated(raw)
        return self._expressions[raw]

    def _translated(self, raw: sympy.Expr) -> sympy.Expr:
        """Return torch's expression with the user's symbols. Raises `UnsupportedGraph` if others are left."""
        found = self.env.replace(raw).xreplace(self._meaning)
        unknown = found.free_symbols - set(self._user.values())
        if unknown:
            what = f"a size that depends on data ({found})"
            raise UnsupportedGraph(
                "dynamic_shapes", what, "use sizes that follow from those of the inputs", see="data-dependent-size"
            )
        return sympy.expand(found.replace(Max, lambda *args: self.largest(args)))

    def largest(self, expressions: Sequence[sympy.Expr]) -> sympy.Expr:
        """Return the largest of some expressions, without those that never are, as far as their bounds tell."""
        left: list[sympy.Expr] = []
        for e in dict.fromkeys(expressions):
            if not any(self._at_most(e, other) for other in left):
                left = [other for other in left if not self._at_most(other, e)] + [e]
        return left[0] if len(left) == 1 else Max(*left)  # type: ignore[no-untyped-call]

    def _at_most(self, one: sympy.Expr, two: sympy.Expr) -> bool:
        """Return whether `one` is at most `two` for all values of the symbols, as far as their bounds tell."""
        difference = sympy.expand(two - one)
        if difference.is_Integer:
            return bool(difference >= 0)
        return bool(bound_sympy(difference, self._ranges).lower >= 0)

    def text(self, expression: sympy.Expr) -> str:
        """Return an expression in the notation of `memplan.symbolic.sizes`.

        Raises `UnsupportedGraph` for what that notation has no words for.
        """
        if expression not in self._texts:
            text = PythonPrinter().doprint(expression)
            try:
                Expression(text, self.names)
            except InvalidPlan as error:
                what = f"a size that is not a whole-number expression ({text})"
                raise UnsupportedGraph(
                    "dynamic_shapes", what, "leave that dimension out of dynamic_shapes", see="whole-number"
                ) from error
            self._texts[expression] = text
        return self._texts[expression]

    # -- guards ------------------------------------------------------------------------------------------

    def conditions(self) -> tuple[str, ...]:
        """Return everything that the trace depends on, as conditions on the user's symbols; some may always hold."""
        found: list[str] = []
        for guard in list(self.env.guards):
            found += self._condition(guard.expr, str(getattr(guard, "sloc", "") or ""))
        for symbol, meaning in self._meaning.items():
            value = self.env.replacements.get(symbol)
            if value is not None:
                found += self._condition(sympy.Eq(symbol, value, evaluate=False), "")
            bounds = self.env.var_to_range.get(symbol)
            if bounds is not None and meaning.free_symbols:
                if bounds.lower.is_Integer:
                    found += self._condition(meaning >= bounds.lower, "")
                if bounds.upper.is_Integer:
                    found += self._condition(meaning <= bounds.upper, "")
        return tuple(dict.fromkeys(found))

    def _condition(self, raw: Any, where: str) -> list[str]:
        """Return a guard as a condition; nothing where it always holds or depends on none of the user's symbols."""
        said = raw.xreplace(self._meaning)
        if said in (sympy.true, True) or not said.free_symbols & set(self._user.values()):
            return []
        unknown = said.free_symbols - set(self._user.values())
        if unknown:
            said = self.env.replace(raw).xreplace(self._meaning)
            if said in (sympy.true, True):
                return []
            if said.free_symbols - set(self._user.values()):
                what = f"a branch that depends on more than sizes ({said})"
                raise UnsupportedGraph(
                    "dynamic_shapes", what, "leave that dimension out of dynamic_shapes", see="varying"
                )
        text = self.text(said)
        self._reasons.setdefault(text, where)
        return [text]

    def reason(self, text: str) -> str:
        """Return where a condition came from, for an error message."""
        where = " ".join(self._reasons.get(text, "").split())
        return f", because of {where[:300]}" if where else ""
