"""The dimensions that vary from call to call: each has a name and a range, like `torch.export.Dim`."""

from __future__ import annotations

import keyword
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

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
