"""Python numbers of an optimizer's update as expressions: what is computed from its options and counters at each step.

While an update is recorded, its options (learning rate, betas) and counters are `Real` and `Whole` numbers. Arithmetic
on them makes expressions, which Python evaluates again at every step, in the same order and with the same bits. A
comparison gives the answer for the current values and stores it as a condition of the recording.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


class Untraceable(Exception):
    """Raised while an update is recorded, for what a program cannot follow; its message says what."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An option of a parameter group; `item`: the position in a tuple."""

    group: int
    key: str
    item: int | None = None


@dataclass(frozen=True, slots=True)
class StateNumber:
    """A Python number that the optimizer's state keeps for parameter `name`."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class Item:
    """The number in a tensor of one element, value `value` of the recording; `number` counts the reads."""

    number: int
    value: int


@dataclass(frozen=True, slots=True)
class Constant:
    """A number as Python writes it."""

    text: str


@dataclass(frozen=True, slots=True)
class Operation:
    """A Python operator or function on expressions, as a format of its source."""

    text: str
    operands: tuple[Expression, ...]


Expression = Setting | StateNumber | Item | Constant | Operation


@dataclass(frozen=True, slots=True)
class Numeral:
    """An argument of a recorded op that is a number: its expression, and its value while it was recorded."""

    expression: Expression
    example: float


@dataclass(slots=True)
class Conditions:
    """The expressions that must have the same values for a recording to be valid, in the order of their first use."""

    found: dict[Expression, Any] = field(default_factory=dict)

    def require(self, number: Number) -> Any:
        """Store that a number must have its current value, and return that. Raises `Untraceable` if it is unknown."""
        if not number.node.known:
            raise Untraceable("a Python number that depends on gradients decides what the update does")
        self.found[number.node.expression] = number.node.value
        return number.node.value


class Node:
    """The node of a number, as torch's C++ code expects it from a `torch.SymFloat` or `torch.SymInt`.

    `known`: the value is that of the current step, not only an example.
    """

    def __init__(self, expression: Expression, value: float, conditions: Conditions, *, known: bool) -> None:
        self.expression, self.value, self.conditions, self.known = expression, value, conditions, known

    def is_int(self) -> bool:
        """Return whether it is an integer."""
        return isinstance(self.value, int)

    def is_float(self) -> bool:
        """Return whether it is a float."""
        return isinstance(self.value, float)

    def is_bool(self) -> bool:
        """Return False."""
        return False

    is_constant = is_nested_int = is_bool

    def is_symbolic(self) -> bool:
        """Return True."""
        return True

    def has_hint(self) -> bool:
        """Return True."""
        return True

    def maybe_as_int(self) -> None:
        """Return None: it is no constant."""

    nested_int = constant_int = maybe_as_int

    def _value(self, file: str = "", line: int = 0) -> Any:
        return self.conditions.require(number_of(self))

    guard_float = guard_int = guard_size_oblivious = _value

    def _graph_repr(self) -> str:
        return repr(self.expression)

    __str__ = _graph_repr


def _operator(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that makes an operation; the operands are in the order in which the source has them."""

    def method(self: Number, *others: Any) -> Any:
        return operation(text, function, self, *others)

    return method


def _reflected(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        return operation(text, function, other, self)

    return method


def _comparison(text: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Number, other: Any) -> Any:
        return decided(text, function, self, other)

    return method


class _Arithmetic:
    """The operators of a number; each makes a new one."""

    node: Node
    __add__, __radd__ = _operator("({} + {})", operator.add), _reflected("({} + {})", operator.add)
    __sub__, __rsub__ = _operator("({} - {})", operator.sub), _reflected("({} - {})", operator.sub)
    __mul__, __rmul__ = _operator("({} * {})", operator.mul), _reflected("({} * {})", operator.mul)
    __truediv__, __rtruediv__ = _operator("({} / {})", operator.truediv), _reflected("({} / {})", operator.truediv)
    __floordiv__ = _operator("({} // {})", operator.floordiv)
    __rfloordiv__ = _reflected("({} // {})", operator.floordiv)
    __mod__, __rmod__ = _operator("({} % {})", operator.mod), _reflected("({} % {})", operator.mod)
    __pow__, __rpow__ = _operator("({} ** {})", operator.pow), _reflected("({} ** {})", operator.pow)
    __neg__, __abs__, __pos__ = (
        _operator("(-{})", operator.neg),
        _operator("abs({})", operator.abs),
        _operator("(+{})", operator.pos),
    )
    __eq__, __ne__ = _comparison("({} == {})", operator.eq), _comparison("({} != {})", operator.ne)
    __lt__, __le__ = _comparison("({} < {})", operator.lt), _comparison("({} <= {})", operator.le)
    __gt__, __ge__ = _comparison("({} > {})", operator.gt), _comparison("({} >= {})", operator.ge)

    def __bool__(self) -> bool:
        return bool(decided("({} != 0)", lambda x: x != 0, self))

    def __float__(self) -> float:
        return float(self.node._value())

    def __int__(self) -> int:
        return int(self.node._value())

    __index__ = __trunc__ = __int__

    def __round__(self, digits: int | None = None) -> Any:
        return round(self.node._value(), digits)

    def __floor__(self) -> Any:
        return operation("math.floor({})", math.floor, self)

    def __ceil__(self) -> Any:
        return operation("math.ceil({})", math.ceil, self)

    def __hash__(self) -> int:
        return hash(self.node._value())

    def __format__(self, spec: str) -> str:
        return format(self.node._value(), spec)

    def __repr__(self) -> str:
        return repr(self.node._value())

    def __deepcopy__(self, memo: Any) -> Any:
        return self


class Real(_Arithmetic, torch.SymFloat):
    """A float of an update that is being recorded. `isinstance(x, float)` holds."""

    __class__ = property(lambda self: float)


class Whole(_Arithmetic, torch.SymInt):
    """An integer of an update that is being recorded. `isinstance(x, int)` holds."""

    __class__ = property(lambda self: int)


Number = Real | Whole


def is_number(thing: Any) -> bool:
    """Return whether a thing is a number that is being recorded, in any of torch's wrappers."""
    return issubclass(type(thing), (torch.SymFloat, torch.SymInt)) and isinstance(thing.node, Node)


def number_of(node: Node) -> Number:
    """Return the number of a node."""
    return (Whole if node.is_int() else Real)(node)


def operation(text: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Return the number that `function` makes of numbers, of which one at least is recorded."""
    if not all(is_number(x) or type(x) in (int, float, bool) for x in operands):
        return NotImplemented
    nodes = [x.node for x in operands if is_number(x)]
    made = function(*(x.node.value if is_number(x) else x for x in operands))
    if type(made) not in (int, float):
        raise Untraceable(f"a Python number of the update becomes a {type(made).__name__}")
    expression = Operation(text, tuple(map(expression_of, operands)))
    return number_of(Node(expression, made, nodes[0].conditions, known=all(n.known for n in nodes)))


def decided(text: str, function: Callable[..., Any], *operands: Any) -> Any:
    """Return the answer of a comparison for the current values, which becomes a condition of the recording."""
    if not all(is_number(x) or type(x) in (int, float, bool) for x in operands):
        return NotImplemented
    nodes = [x.node for x in operands if is_number(x)]
    answer = function(*(x.node.value if is_number(x) else x for x in operands))
    expression = Operation(text, tuple(map(expression_of, operands)))
    return nodes[0].conditions.require(
        number_of(Node(expression, answer, nodes[0].conditions, known=all(n.known for n in nodes)))
    )


def expression_of(x: Any) -> Expression:
    """Return the expression of a number."""
    if is_number(x):
        found: Expression = x.node.expression
        return found
    return Constant(repr(x) if math.isfinite(x) else f"float({str(x)!r})")


def items_of(expression: Expression) -> Iterator[Item]:
    """Yield the reads of tensors in an expression."""
    if isinstance(expression, Item):
        yield expression
    elif isinstance(expression, Operation):
        for operand in expression.operands:
            yield from items_of(operand)


def source_of(expression: Expression, item: Callable[[Item], str]) -> str:
    """Return Python source that evaluates an expression with the names `groups` and `kept`; `item` writes a read."""
    if isinstance(expression, Item):
        return item(expression)
    if isinstance(expression, Constant):
        return expression.text
    if isinstance(expression, Setting):
        position = "" if expression.item is None else f"[{expression.item}]"
        return f"optimizer.param_groups[{expression.group}][{expression.key!r}]{position}"
    if isinstance(expression, StateNumber):
        return f"kept({expression.name!r}, {expression.key!r})"
    return expression.text.format(*(source_of(one, item) for one in expression.operands))


def function_of(
    source: str, arguments: str, optimizer: torch.optim.Optimizer, kept: Callable[[str, str], Any]
) -> Callable[..., Any]:
    """Return `lambda arguments: source`, with the current options of the optimizer and the numbers of its state."""
    names: dict[str, Any] = {"math": math, "optimizer": optimizer, "kept": kept}
    made: Callable[..., Any] = eval(compile(f"lambda {arguments}: {source}", "<memplan update>", "eval"), names)
    return made


class MathOfNumbers:
    """Stands for the module `math` while an update is recorded: its functions take recorded numbers too."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(math, name)
        if not callable(found):
            return found

        def function(*operands: Any) -> Any:
            if not any(map(is_number, operands)):
                return found(*operands)
            return operation(f"math.{name}({', '.join(['{}'] * len(operands))})", found, *operands)

        return function


def _extreme(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def extreme(*operands: Any, **options: Any) -> Any:
        values = operands if len(operands) > 1 or options else list(operands[0])
        if options or not any(map(is_number, values)):
            return function(*operands, **options)
        made = operation(f"{name}({', '.join(['{}'] * len(values))})", function, *values)
        return function(*operands) if made is NotImplemented else made

    return extreme


FUNCTIONS: Mapping[str, Any] = {"math": MathOfNumbers(), "max": _extreme("max", max), "min": _extreme("min", min)}
