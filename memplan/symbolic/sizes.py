"""The table of all sizes of a graph as expressions, which turns the graph for the hints into that for other values.

A size is text that can be evaluated (`Expression`), over the dimensions that vary from call to call (`Symbol`): each
has a name and a range, like `torch.export.Dim`.
"""

from __future__ import annotations

import ast
import keyword
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

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


_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
_FUNCTIONS = {"max": max, "min": min}
_LONGEST = 2000  # characters
_DEEPEST = 400  # parts inside of each other
_HIGHEST_POWER = 8

Evaluate = Callable[..., tuple[int, ...]]


class Expression:
    """A whole number, or a condition, as an expression of `symbols`. Raises `InvalidPlan` for any other text.

    Expressions with equal texts and symbols are equal. `evaluate(*values)` takes the values in the order of `symbols`.
    """

    def __init__(self, text: str, symbols: Sequence[str], where: str = "expression") -> None:
        self.text = text
        self.symbols = tuple(symbols)
        try:
            self.condition = _check(_parse(text, where), frozenset(symbols), text, where)
        except RecursionError as error:
            raise _too_deep(text, where) from error

    def evaluate(self, *values: int) -> int:
        """Return the value of the expression (of a condition: 0 or 1). Raises `InvalidPlan` if a divisor is 0."""
        return evaluator([self.text], self.symbols)(*values)[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expression) and (self.text, self.symbols) == (other.text, other.symbols)

    def __hash__(self) -> int:
        return hash((self.text, self.symbols))

    def __repr__(self) -> str:
        return f"Expression({self.text!r})"


def evaluator(texts: Sequence[str], symbols: Sequence[str]) -> Evaluate:
    """Return a function that takes a value for each symbol and returns the value of every text.

    The texts must have been checked by `Expression` before.
    """
    names = [_placeholder(i) for i in range(len(symbols))]
    known = dict(zip(symbols, names, strict=True))
    try:
        body = ast.Tuple(elts=[_renamed(_parse(text, "expression"), known) for text in texts], ctx=ast.Load())
        arguments = ast.arguments([], [ast.arg(name) for name in names], None, [], [], None, [])
        tree = ast.fix_missing_locations(ast.Expression(ast.Lambda(arguments, body)))
        made: Evaluate = eval(compile(tree, "<sizes>", "eval"), {"__builtins__": {}, **_FUNCTIONS})
    except RecursionError as error:
        raise _too_deep(max(texts, key=len), "expression") from error

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


def _placeholder(index: int) -> str:
    return f"x{index}"


def _parse(text: str, where: str) -> ast.expr:
    if len(text) > _LONGEST:
        raise InvalidPlan(f"an expression of {len(text)} characters", where=where)
    try:
        return ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise InvalidPlan(f"{clip(ascii(text))} is not an expression", where=where) from error


def _check(node: ast.expr, symbols: frozenset[str], text: str, where: str, depth: int = 0) -> bool:
    """Return whether `node` is a condition. Raises `InvalidPlan` naming the first part that is not allowed."""
    if depth > _DEEPEST:  # whatever limit of recursion a library has set
        raise _too_deep(text, where)
    parts = _parts(node, symbols)
    if parts is None:
        raise _not_allowed(node, text, where)
    of_conditions = isinstance(node, ast.BoolOp) or (isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not))
    for part in parts:
        if _check(part, symbols, text, where, depth + 1) is not of_conditions:
            raise _not_allowed(part, text, where)
    return of_conditions or isinstance(node, ast.Compare)


def _parts(node: ast.expr, symbols: frozenset[str]) -> Sequence[ast.expr] | None:
    """Return the operands of a node; None for a node that is not allowed."""
    match node:
        case ast.Constant(value=int(number)) if type(number) is int and abs(number) < 2**63:
            return ()
        case ast.Name(id=name) if name in symbols:
            return ()
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=part):
            return (part,)
        case ast.BinOp(left=left, op=ast.Pow(), right=ast.Constant(value=int(power))) if 0 <= power <= _HIGHEST_POWER:
            return None if _has_power(left) else (left,)  # powers of powers could be extremely large
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, _OPERATORS):
            return (left, right)
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS and len(parts) > 1:
            return parts
        case ast.Compare(left=left, ops=ops, comparators=others) if all(isinstance(op, _COMPARISONS) for op in ops):
            return (left, *others)
        case ast.BoolOp(values=parts):
            return parts
    return None


def _too_deep(text: str, where: str) -> InvalidPlan:
    return InvalidPlan(f"{clip(ascii(text))} is nested too deeply", where=where)


def _has_power(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Pow) for part in ast.walk(node))


def _not_allowed(node: ast.expr, text: str, where: str) -> InvalidPlan:
    part = ast.get_source_segment(text, node) or text
    hint = "sizes are made of whole numbers, the plan's symbols, + - * // % **, max, min and comparisons"
    return InvalidPlan(f"{clip(ascii(part))} in {clip(ascii(text))} is not allowed", where=where, hint=hint)


def _renamed(node: ast.expr, names: dict[str, str]) -> ast.expr:
    class Rename(ast.NodeTransformer):
        def visit_Name(self, found: ast.Name) -> ast.Name:
            return ast.Name(names.get(found.id, found.id), ast.Load())

    renamed = Rename().visit(node)
    assert isinstance(renamed, ast.expr)
    return renamed


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
