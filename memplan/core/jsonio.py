"""Reads and writes frozen dataclasses as strict JSON: a value that is written is read back equal.

The dataclass is the schema. As in packaging's `pylock.py`, there is no coercion, unknown and missing keys are refused,
and every error names its path ("solution.offsets.mm_3").
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from memplan.errors import InvalidPlan, InvalidProblem, UnreadableFile

_HIGHEST = 2**63 - 1  # the largest number of bytes or steps that is read; sums of them stay cheap and printable
T = TypeVar("T")


def to_json(value: object) -> Any:
    """Convert dataclasses, enums, tuples and mappings to plain JSON types.

    Fields that equal their default are left out, and so are fields that take no part in comparisons
    (`compare=False`, such as seconds spent). Equal values give equal JSON, byte for byte.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((f, getattr(value, f.name)) for f in dataclasses.fields(value) if f.compare)
        return {f.name: to_json(v) for f, v in fields if f.default is dataclasses.MISSING or v != f.default}
    if isinstance(value, enum.Enum):
        return value.name.lower()
    if isinstance(value, (tuple, list)):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): to_json(item) for key, item in value.items()}
    return value


def from_json(kind: type[T], data: object, where: str) -> T:
    """Read `data` as a `kind`. Raises `InvalidPlan`, whose `where` is the path of the first fault."""
    return typing.cast(T, _read(kind, data, where))


def _read(kind: Any, data: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _read_dataclass(kind, data, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _read_enum(kind, data, where)
    if origin in (typing.Union, types.UnionType):
        if data is None:
            return None
        (inner,) = (arg for arg in typing.get_args(kind) if arg is not type(None))
        return _read(inner, data, where)
    if origin is tuple:
        return _read_tuple(typing.get_args(kind), data, where)
    if origin is Mapping or (isinstance(origin, type) and issubclass(origin, Mapping)):
        _, item = typing.get_args(kind)
        _require(isinstance(data, dict), dict, data, where)
        return {_text(key, where): _read(item, value, f"{where}.{clip(key)}") for key, value in data.items()}
    return _read_scalar(kind, data, where)


def _read_dataclass(kind: type, data: Any, where: str) -> Any:
    _require(isinstance(data, dict), dict, data, where)
    fields, hints = _schema(kind)
    for key in data:
        if key not in fields:
            raise InvalidPlan("unknown key", where=f"{where}.{clip(key)}")
    given: dict[str, Any] = {}
    for name, f in fields.items():
        if name in data:
            given[name] = _read(hints[name], data[name], f"{where}.{name}")
        elif f.default is dataclasses.MISSING:
            raise InvalidPlan("missing", where=f"{where}.{name}")
    try:
        return kind(**given)
    except InvalidProblem as error:
        raise InvalidPlan(str(error), where=where) from error


@functools.cache
def _schema(kind: type) -> tuple[dict[str, dataclasses.Field[Any]], dict[str, Any]]:
    return {f.name: f for f in dataclasses.fields(kind) if f.compare}, typing.get_type_hints(kind)


def _read_enum(kind: type[enum.Enum], data: Any, where: str) -> enum.Enum:
    names = {member.name.lower(): member for member in kind}
    if not isinstance(data, str) or data not in names:
        raise InvalidPlan(f"{show(data)} is none of {', '.join(names)}", where=where)
    return names[data]


def _read_tuple(items: tuple[Any, ...], data: Any, where: str) -> tuple[Any, ...]:
    _require(isinstance(data, list), list, data, where)
    if items[-1] is Ellipsis:
        return tuple(_read(items[0], value, f"{where}[{i}]") for i, value in enumerate(data))
    if len(items) != len(data):
        raise InvalidPlan(f"{len(data)} items, expected {len(items)}", where=where)
    return tuple(_read(k, value, f"{where}[{i}]") for i, (k, value) in enumerate(zip(items, data, strict=True)))


def _read_scalar(kind: Any, data: Any, where: str) -> Any:
    if type(data) is int and abs(data) > _HIGHEST:
        raise InvalidPlan(f"a number beyond {_HIGHEST}", where=where)
    if kind is float and type(data) is int:
        data = float(data)
    _require(type(data) is kind, kind, data, where)
    if kind is float and not math.isfinite(data):
        raise InvalidPlan(f"{data!r} is not a finite number", where=where)
    return _text(data, where) if kind is str else data


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # a lone surrogate: JSON can spell it, no file can hold it
        raise InvalidPlan(f"{show(text)} is not Unicode text", where=where) from error
    return text


def _require(ok: bool, kind: type, data: object, where: str) -> None:
    if not ok:
        raise InvalidPlan(f"{show(data)} is not of type {_NAMES.get(kind, kind.__name__)}", where=where)


_NAMES: Mapping[type, str] = types.MappingProxyType(
    {dict: "object", list: "list", str: "string", int: "whole number", float: "number", bool: "true or false"}
)


def show(data: object) -> str:
    """Return a JSON value as short text on one line, for an error message."""
    if isinstance(data, dict):
        return f"an object of {len(data)} keys"
    if isinstance(data, list):
        return f"a list of {len(data)} items"
    if type(data) is int and abs(data) > _HIGHEST:
        return "a very large number"
    return clip(ascii(data))


def clip(text: str) -> str:
    """Return `text` shortened to at most 60 characters."""
    return text if len(text) <= 60 else text[:57] + "..."


def require_path(path: Any, hint: str) -> str | os.PathLike[str]:
    """Return what can be the path of a file. Raises `UnreadableFile`, with `hint`, for anything else."""
    if not isinstance(path, (str, os.PathLike)):
        raise UnreadableFile(f"is given a {type(path).__name__}, not the path of a file", where="path", hint=hint)
    return path


def read_json(path: str | os.PathLike[str], hint: str) -> Any:
    """Return the contents of a JSON file. Raises `UnreadableFile`, with `hint`, if there are none."""
    where = os.fspath(require_path(path, hint))
    try:
        return json.loads(
            Path(where).read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=where, hint=hint) from error
    except RecursionError as error:
        raise UnreadableFile("is not JSON: nested too deeply", where=where, hint=hint) from error
    except ValueError as error:
        raise UnreadableFile(f"is not JSON: {error}", where=where, hint=hint) from error


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"key {clip(ascii(twice))} stands twice in one object")
    return found
