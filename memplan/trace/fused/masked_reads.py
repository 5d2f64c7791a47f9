"""Proves that a loop reads a tensor under a mask only at the index that it writes.

A loop over a padded tensor, as over the gradient of shifted logits (`logits[:, :-1]`), reads what was not padded under
a mask such as `column < 15`. Inductor writes the index of such a read for any column: with divisions and remainders
that change nothing where the mask holds. Only with its range there are both indices seen to be equal.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
from torch._inductor.ops_handler import DefaultHandler
from torch._inductor.virtualized import V

Ranges = dict[sympy.Symbol, sympy.Expr]


def reads_where_it_writes(loop: Any, buffer: str) -> bool:
    """Return whether each read of `buffer` in a loop is at the index of the loop's only store, where its mask holds.

    Args:
        loop: A node of Inductor's scheduler. For one without a body of a single loop, as a template, the answer is no.
        buffer: The name of what is read.
    """
    body = getattr(loop, "_body", None)
    if body is None or loop.is_template() or loop.is_reduction():
        return False
    variables = {v: sympy.Symbol(f"own_{v}", integer=True, nonnegative=True) for v in body.var_ranges}
    followed = _Followed({variables[v]: size for v, size in body.var_ranges.items()})
    with V.set_ops_handler(followed):
        body([variables[v] for v in body.iter_vars], [variables[v] for v in body.reduce_vars])
    if len(followed.stores) != 1 or buffer not in followed.loads:
        return False
    (store,) = followed.stores
    simplified = V.graph.sizevars.simplify_with_ranges
    return all(bool(simplified(index, ranges) == simplified(store, ranges)) for index, ranges in followed.loads[buffer])


class _Unknown:
    """A value of which nothing is known, nor of its parts."""

    def __getitem__(self, _: object) -> _Unknown:
        return self


class _Followed(DefaultHandler):
    """Runs the body of a loop on indices alone. A mask is the numbers that variables of the loop are below, if known.

    `loads` are, by the name of a buffer, the index of each read and the ranges of the loop's variables where the mask
    holds; `stores` are the indices of the stores.
    """

    def __init__(self, ranges: Ranges) -> None:
        self.loads: dict[str, list[tuple[sympy.Expr, Ranges]]] = {}
        self.stores: list[sympy.Expr] = []
        self._ranges = ranges

    def _default(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return _Unknown()

    def constant(self, value: Any, dtype: Any) -> Any:
        """Return a whole number as one that an index can be compared with."""
        return sympy.Integer(value) if type(value) is int else _Unknown()

    def index_expr(self, expr: Any, dtype: Any) -> Any:
        """Return the expression of an index that is used as a value."""
        return expr

    def lt(self, x0: Any, x1: Any) -> Any:
        """Return the condition on a variable of the loop; others are unknown."""
        limits = isinstance(x0, sympy.Symbol) and x0 in self._ranges and isinstance(x1, sympy.Integer)
        return {x0: x1} if limits else _Unknown()

    def and_(self, x0: Any, x1: Any) -> Any:
        """Return the condition that both hold; of one that is unknown, nothing follows."""
        known = [x for x in (x0, x1) if isinstance(x, dict)]
        if not known:
            return _Unknown()
        both = dict(known[0])
        for limits in known[1:]:
            both |= {v: sympy.Min(both.get(v, limit), limit) for v, limit in limits.items()}
        return both

    def masked(self, mask: Any, body: Callable[[], Any], other: Any) -> Any:
        """Run what is computed where a mask holds."""
        with self._where(mask):
            return body()

    @contextlib.contextmanager
    def _where(self, mask: Any) -> Iterator[None]:
        """Have the ranges in which a mask holds."""
        before = self._ranges
        if isinstance(mask, dict):
            self._ranges = before | {v: sympy.Min(before[v], limit) for v, limit in mask.items()}
        try:
            yield
        finally:
            self._ranges = before

    def load(self, name: str, index: Any) -> Any:
        """Note a read."""
        self.loads.setdefault(name, []).append((index, self._ranges))
        return _Unknown()

    def store(self, name: str, index: Any, value: Any, mode: Any = None) -> None:
        """Note a store."""
        self.stores.append(index)

    def indirect_indexing(self, x: Any, size: Any, check: bool = True, wrap_neg: bool = True) -> Any:
        """Return an index that is read from a tensor: a variable of no range, which no index of a store has."""
        return sympy.Dummy("indirect", integer=True)
