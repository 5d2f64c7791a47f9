"""Parses and evaluates sizes as expressions of symbols, in a small, strict subset of Python, with exact integers.

    4*batch*seq*(seq - 1)//2      max(1, width - 1)      batch < 16

A size is readable text in a plan file. It is parsed with `ast`; anything other than a whole number, a known symbol,
`+ - * // % **`, `max`, `min`, a comparison, `and`, `or` and `not` is refused before anything is evaluated.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Sequence

from memplan.core.jsonio import clip
from memplan.errors import InvalidPlan

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
    together = evaluator(conditions, symbols)
    each = [evaluator([text], symbols) for text in conditions]

    def holds(one: Evaluate, values: tuple[int, ...]) -> int:
        try:
            return one(*values)[0]
        except InvalidPlan:
            return 0

    def held(*values: int) -> tuple[int, ...]:
        try:
            return together(*values)
        except InvalidPlan:
            return tuple(holds(one, values) for one in each)

    return held


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
