"""Whether a loop reads a tensor only at the index that it writes, where the mask of the read holds."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import sympy
import torch
from torch._inductor.sizevars import SizeVarAllocator
from torch._inductor.virtualized import V
from torch.utils._sympy.functions import ModularIndexing

from memplan.trace.fused.masked_reads import reads_where_it_writes

ROWS, COLUMNS, LIMIT = 3, 16, 15  # a tensor of rows, of which all columns but the last are read
Body = Callable[[Any, sympy.Symbol, sympy.Symbol], None]


def _packed(row: Any, column: Any) -> Any:
    """The index in the padded tensor of what is at a row and a column of the one that was not padded."""
    flat = LIMIT * row + column
    return COLUMNS * ModularIndexing(flat, LIMIT, ROWS) + ModularIndexing(flat, 1, LIMIT)


class _Loop:
    """A loop over rows and columns with a body that calls `ops`, as one of Inductor's does."""

    def __init__(self, run: Body, *, reduces: bool = False, template: bool = False) -> None:
        self._run = run
        self._body = self if run is not None else None
        self.iter_vars, self.reduce_vars = list(sympy.symbols("p0 p1")), list[sympy.Symbol]()
        self.var_ranges = dict(zip(self.iter_vars, (sympy.Integer(ROWS), sympy.Integer(COLUMNS)), strict=True))
        self.is_reduction, self.is_template = (lambda: reduces), (lambda: template)

    def __call__(self, indices: list[sympy.Symbol], _: list[sympy.Symbol]) -> None:
        self._run(V.get_ops_handler(), *indices)


def _asked(loop: _Loop) -> bool:
    with V.set_graph_handler(SimpleNamespace(sizevars=SizeVarAllocator())):  # type: ignore[arg-type]
        return reads_where_it_writes(loop, "logits")


def _padded(limit: int = LIMIT, index: Callable[[Any, Any], Any] = _packed, **kinds: bool) -> _Loop:
    """A loop that reads under `column < limit`, and writes zeros beside it."""

    def run(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.index_expr(column, torch.int64), ops.constant(limit, torch.int64))
        value = ops.masked(mask, lambda: ops.exp(ops.load("logits", index(row, column))), 0.0)
        ops.store("result", COLUMNS * row + column, ops.where(mask, value, ops.constant(0.0, torch.float32)))

    return _Loop(run, **kinds)


def test_the_range_of_the_mask_shows_that_both_indices_are_equal() -> None:
    assert _asked(_padded())
    assert _asked(_padded(limit=7))


@pytest.mark.parametrize("limit", [COLUMNS, 2 * COLUMNS])
def test_a_mask_that_lets_other_columns_in_does_not(limit: int) -> None:
    assert not _asked(_padded(limit))


@pytest.mark.parametrize(
    "index",
    [
        lambda row, column: _packed(row, column) + 1,
        lambda row, column: _packed(row, 0) + column + COLUMNS,
        lambda row, column: COLUMNS * column + row,
    ],
)
def test_another_place_is_seen_to_be_another(index: Callable[[Any, Any], Any]) -> None:
    assert not _asked(_padded(index=index))


def test_each_read_is_looked_at() -> None:
    def run(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.index_expr(column, torch.int64), ops.constant(LIMIT, torch.int64))
        value = ops.masked(mask, lambda: ops.load("logits", _packed(row, column)), 0.0)
        ops.store("result", COLUMNS * row + column, ops.add(value, ops.load("logits", _packed(row, column))))

    assert not _asked(_Loop(run))  # the second has no mask


def test_a_mask_of_values_and_an_index_of_values_are_unknown() -> None:
    def masked_by_values(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        mask = ops.lt(ops.load("other", column), ops.constant(LIMIT, torch.int64))
        value = ops.masked(mask, lambda: ops.load("logits", _packed(row, column)), 0.0)
        ops.store("result", COLUMNS * row + column, value)

    def at_values(ops: Any, row: sympy.Symbol, column: sympy.Symbol) -> None:
        place = ops.indirect_indexing(ops.load("other", column), COLUMNS)
        ops.store("result", COLUMNS * row + column, ops.load("logits", COLUMNS * row + place))

    assert not _asked(_Loop(masked_by_values))
    assert not _asked(_Loop(at_values))
