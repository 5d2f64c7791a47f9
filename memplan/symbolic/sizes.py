"""The table of all sizes of a graph as expressions, which turns the graph for the hints into that for other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from memplan.core.graph import Graph, Op, Storage, Value
from memplan.core.in_place_reuse import used_candidates
from memplan.errors import InvalidPlan, ShapeOutOfRange
from memplan.symbolic.expression import Expression
from memplan.symbolic.symbols import Symbol


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a graph. `expressions` are distinct texts; all other fields hold indices into it.

    `storages[i]` is the size of storage i in bytes. `views[i]` is the shape of value i, followed by its strides and its
    offset, in elements.
    """

    expressions: tuple[str, ...]
    storages: tuple[int, ...]
    views: tuple[tuple[int, ...], ...]


class SizesWriter:
    """Collects distinct expressions, in order of appearance."""

    def __init__(self) -> None:
        self._place: dict[str, int] = {}

    def add(self, text: str) -> int:
        """Return the index of an expression, which is added if it is new."""
        return self._place.setdefault(text, len(self._place))

    def finish(self, storages: Sequence[str], views: Sequence[Sequence[str]]) -> Sizes:
        """Return the table of sizes for these storages (bytes) and values (shape, strides, offset)."""
        placed = tuple(tuple(map(self.add, view)) for view in views)
        sized = tuple(map(self.add, storages))
        return Sizes(expressions=tuple(self._place), storages=sized, views=placed)


def graph_at(graph: Graph, sizes: Sizes, numbers: Sequence[int]) -> Graph:
    """Return the graph with other sizes; `numbers[i]` is the value of `sizes.expressions[i]`.

    Raises `ShapeOutOfRange` if a size would be negative.
    """

    def view(value: Value, places: tuple[int, ...]) -> Value:
        n = len(value.shape)
        found = tuple(numbers[p] for p in places)
        if min(found) < 0:
            raise ShapeOutOfRange(
                "would have a negative size", where=value.name, hint="narrow the range of its symbols"
            )
        return replace(value, shape=found[:n], strides=found[n:-1], offset=found[-1])

    def sized(storage: Storage, place: int) -> Storage:
        if numbers[place] < 0:
            raise ShapeOutOfRange("would have a negative size", where=storage.name, hint="narrow its symbols' range")
        return storage if numbers[place] == storage.nbytes else replace(storage, nbytes=numbers[place])

    return replace(
        graph,
        values=tuple(map(view, graph.values, sizes.views)),
        storages=tuple(map(sized, graph.storages, sizes.storages)),
    )


def check_sizes(graph: Graph, sizes: Sizes, symbols: Sequence[Symbol], evaluate: Callable[..., Sequence[int]]) -> None:
    """Raise `InvalidPlan` unless the table gives `graph` at the symbols' hints.

    `evaluate` returns the values of all expressions for values of the symbols.
    """
    _check_table(graph, sizes)
    names = [s.name for s in symbols]
    for i, text in enumerate(sizes.expressions):
        if Expression(text, names, f"sizes.expressions[{i}]").condition:
            raise InvalidPlan(f"{text!r} is a condition, not a size", where=f"sizes.expressions[{i}]")
    at_hint = graph_at(graph, sizes, evaluate(*(s.hint for s in symbols)))
    for i, (one, two) in enumerate(zip(at_hint.storages, graph.storages, strict=True)):
        if one != two:
            what = f"is {sizes.expressions[sizes.storages[i]]}, {one.nbytes} at the hint; the graph has {two.nbytes}"
            raise InvalidPlan(what, where=f"sizes.storages[{i}]")
    for i, (here, there) in enumerate(zip(at_hint.values, graph.values, strict=True)):
        if here != there:
            raise InvalidPlan("is not the graph's at the hint", where=f"sizes.views[{i}]")


def _check_table(graph: Graph, sizes: Sizes) -> None:
    """Raise `InvalidPlan` unless every storage and value has its entries and all entries are valid indices."""
    if len(set(sizes.expressions)) != len(sizes.expressions):
        raise InvalidPlan("an expression stands twice", where="sizes.expressions")
    if len(sizes.storages) != len(graph.storages):
        raise InvalidPlan(f"{len(sizes.storages)} entries for {len(graph.storages)}", where="sizes.storages")
    if len(sizes.views) != len(graph.values):
        raise InvalidPlan(f"{len(sizes.views)} entries for {len(graph.values)} values", where="sizes.views")
    for i, (value, places) in enumerate(zip(graph.values, sizes.views, strict=True)):
        if len(places) != 2 * len(value.shape) + 1:
            raise InvalidPlan("needs a shape, strides and an offset", where=f"sizes.views[{i}]")
    for place in (*sizes.storages, *(p for view in sizes.views for p in view)):
        if not 0 <= place < len(sizes.expressions):
            raise InvalidPlan(f"names expression {place}", where="sizes")


def with_stable_candidates(graph: Graph, sizes: Sizes) -> Graph:
    """Return `graph` without the in-place candidates that exist only because of the hints.

    A candidate is kept if the sizes of its storages are equal expressions, and so equal for all values; for an op with
    an `out=` kernel, the layouts of result and input must be equal expressions too.
    """

    def kept(op: Op) -> Op:
        return (
            replace(op, inplace_candidates=tuple(c for c in op.inplace_candidates if is_stable(op, *c)))
            if op.inplace_candidates
            else op
        )

    def is_stable(op: Op, result: int, read: int) -> bool:
        one, two = graph.values[result].storage, graph.values[read].storage
        if sizes.storages[one] != sizes.storages[two]:
            return False
        reads = [r for r in op.reads if graph.values[r].storage == two]
        return not op.direct or all(sizes.views[r] == sizes.views[result] for r in reads)

    return replace(graph, ops=tuple(map(kept, graph.ops)))


def with_used_candidates(graph: Graph, order: Sequence[int]) -> Graph:
    """Return `graph` with only the in-place candidates that `order` uses, so that other sizes use the same ones."""
    kept = dict(used_candidates(graph, order))
    ops = (
        replace(op, inplace_candidates=(kept[i],) if i in kept else ()) if op.inplace_candidates else op
        for i, op in enumerate(graph.ops)
    )
    return replace(graph, ops=tuple(ops))
