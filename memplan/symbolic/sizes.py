"""The table of all sizes of a graph as expressions, which turns the graph for the hints into that for other values.

A size is text that can be evaluated (`Expression`), over the dimensions that vary from call to call (`Symbol`): each
has a name and a range, like `torch.export.Dim`.
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from memplan.core.graph import Graph, Op, Storage, Value
from memplan.core.in_place import used_candidates
from memplan.core.jsonio import clip
from memplan.errors import InvalidPlan, ShapeOutOfRange

_HIGHEST = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Symbol:
    """A dimension whose size is any whole number from `min` to `max`. Plans are made for `hint`."""

    name: str
    min: int
    max: int
    hint: int

    def __str__(self) -> str:
        return f"{self.name} in {self.min}..{self.max}"


def check_symbols(symbols: Sequence[Symbol]) -> None:
    """Raise `InvalidPlan` for the first symbol with an invalid name, an empty range or a hint outside of its range."""
    seen: set[str] = set()
    for i, s in enumerate(symbols):
        where = f"symbols[{i}]"
        if not s.name.isidentifier() or keyword.iskeyword(s.name) or s.name in {"max", "min"} or s.name in seen:
            raise InvalidPlan(f"{s.name!r} is not a name of its own", where=f"{where}.name")
        if not 0 < s.min <= s.max <= _HIGHEST:
            raise InvalidPlan(f"{s.name} from {s.min} to {s.max}: not a range of sizes", where=where)
        if not s.min <= s.hint <= s.max:
            raise InvalidPlan(f"{s.name}={s.hint} is outside of {s.min}..{s.max}", where=f"{where}.hint")
        seen.add(s.name)


def values_of(symbols: Sequence[Symbol], given: Mapping[str, int]) -> tuple[int, ...]:
    """Return the values in the order of `symbols`. Raises `ShapeOutOfRange` for the first that is missing or out of
    range.
    """
    ranges = "; ".join(map(str, symbols))
    for name in given:
        if all(s.name != name for s in symbols):
            raise ShapeOutOfRange(f"there is no symbol {name!r}", where=name, hint=f"the plan has {ranges or 'none'}")
    for s in symbols:
        value = given.get(s.name)
        if type(value) is not int:
            what = "has no value" if value is None else f"{value!r} is not a whole number"
            raise ShapeOutOfRange(what, where=s.name, hint=f"give a whole number for each of: {ranges}")
        if not s.min <= value <= s.max:
            hint = f"make the plan for a wider range: Dim({s.name!r}, min=..., max=...)"
            raise ShapeOutOfRange(f"is {value}, the plan was made for {s.min}..{s.max}", where=s.name, hint=hint)
    return tuple(given[s.name] for s in symbols)


_ALLOWED = (
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Call, ast.Name, ast.Constant, ast.Load),
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod, ast.Pow, ast.USub, ast.Not, ast.And, ast.Or),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
_FUNCTIONS = {"max": max, "min": min}
_WRITTEN = re.compile(r"[\w\s+\-*/%<>=!(),]{1,2000}")
_HIGHEST_POWER = 8

Evaluate = Callable[..., tuple[int, ...]]


class Expression:
    """A whole number, or a condition, as an expression of `symbols`. Raises `InvalidPlan` for any other text.

    `evaluate(*values)` takes the values in the order of `symbols`.
    """

    def __init__(self, text: str, symbols: Sequence[str], where: str = "expression") -> None:
        self.text = text
        self.symbols = tuple(symbols)
        try:
            node = ast.parse(text if _WRITTEN.fullmatch(text) else "", mode="eval").body
            wrong = next((part for part in ast.walk(node) if not _is_allowed(part, self.symbols)), None)
            evaluator([] if wrong else [text], symbols)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise InvalidPlan(f"{clip(ascii(text))} is no expression", where=where, hint=_HINT) from error
        if wrong is not None:
            part = ast.get_source_segment(text, wrong) or text
            raise InvalidPlan(f"{clip(ascii(part))} in {clip(ascii(text))} is not allowed", where=where, hint=_HINT)
        negated = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
        self.condition = negated or isinstance(node, ast.Compare | ast.BoolOp)

    def evaluate(self, *values: int) -> int:
        """Return the value of the expression (of a condition: 0 or 1). Raises `InvalidPlan` if a divisor is 0."""
        return evaluator([self.text], self.symbols)(*values)[0]


_HINT = "sizes are made of whole numbers, the plan's symbols, + - * // % **, max, min and comparisons"


def _is_allowed(node: ast.AST, symbols: Sequence[str]) -> bool:
    """Return whether a part of an expression, apart from its own parts, is one that sizes are made of."""
    match node:
        case ast.Constant(value=number):
            return type(number) is int and abs(number) < 2**63
        case ast.Name(id=name):
            return name in symbols or name in _FUNCTIONS
        case ast.BinOp(left=left, op=ast.Pow(), right=right):  # powers of powers could be extremely large
            plain = isinstance(right, ast.Constant) and right.value in range(_HIGHEST_POWER + 1)
            return plain and not any(isinstance(part, ast.Pow) for part in ast.walk(left))
        case ast.Call(func=function, args=parts, keywords=others):
            return isinstance(function, ast.Name) and function.id in _FUNCTIONS and len(parts) > 1 and not others
    return isinstance(node, _ALLOWED)


def evaluator(texts: Sequence[str], symbols: Sequence[str]) -> Evaluate:
    """Return a function that takes a value for each symbol and returns the value of every text.

    The texts must have been checked by `Expression` before.
    """
    source = f"lambda {', '.join(symbols)}: ({''.join(f'({text}),' for text in texts)})"
    made: Evaluate = eval(source, {"__builtins__": {}, **_FUNCTIONS})

    def evaluate(*values: int) -> tuple[int, ...]:
        try:
            return made(*values)
        except (ZeroDivisionError, OverflowError) as error:
            given = ", ".join(f"{name}={value}" for name, value in zip(symbols, values, strict=True))
            raise InvalidPlan(f"a size cannot be computed for {given}: {error}", where="sizes") from error

    return evaluate


def holder(conditions: Sequence[str], symbols: Sequence[str]) -> Evaluate:
    """Return a function that takes a value for each symbol and returns 1 for every condition that holds, else 0.

    A condition that cannot be computed, because a divisor is 0, does not hold.
    """
    each = [evaluator([text], symbols) for text in conditions]

    def holds(one: Evaluate, values: tuple[int, ...]) -> int:
        try:
            return one(*values)[0]
        except InvalidPlan:
            return 0

    return lambda *values: tuple(holds(one, values) for one in each)


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

    negative = next((p for p in (*sizes.storages, *chain(*sizes.views)) if numbers[p] < 0), None)
    if negative is not None:
        where = sizes.expressions[negative]
        raise ShapeOutOfRange("would be a negative size", where=where, hint="narrow the range of the symbols")

    def view(value: Value, places: tuple[int, ...]) -> Value:
        n, found = len(value.shape), tuple(numbers[p] for p in places)
        return replace(value, shape=found[:n], strides=found[n:-1], offset=found[-1])

    def sized(storage: Storage, place: int) -> Storage:
        return storage if numbers[place] == storage.nbytes else replace(storage, nbytes=numbers[place])

    return replace(
        graph,
        values=tuple(map(view, graph.values, sizes.views)),
        storages=tuple(map(sized, graph.storages, sizes.storages)),
    )


def check_sizes(graph: Graph, sizes: Sizes, symbols: Sequence[Symbol]) -> None:
    """Raise `InvalidPlan` unless the table gives `graph` at the symbols' hints."""
    names = [s.name for s in symbols]
    for i, text in enumerate(sizes.expressions):
        if Expression(text, names, f"sizes.expressions[{i}]").condition:
            raise InvalidPlan(f"{text!r} is a condition, not a size", where=f"sizes.expressions[{i}]")
    known = range(len(sizes.expressions))
    places = (*sizes.storages, *chain(*sizes.views))
    ranks = [2 * len(value.shape) + 1 for value in graph.values]
    fits = len(sizes.storages) == len(graph.storages) and [len(view) for view in sizes.views] == ranks
    if not fits or any(place not in known for place in places):
        raise InvalidPlan("are not those of the plan's storages and values", where="sizes")
    numbers = evaluator(sizes.expressions, names)(*(s.hint for s in symbols))
    if graph_at(graph, sizes, numbers) != graph:
        raise InvalidPlan("are not those of the plan at the hint", where="sizes")


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
