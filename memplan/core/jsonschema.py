"""Makes the JSON schema of frozen dataclasses, in the form in which `memplan.core.jsonio` reads and writes them."""

from __future__ import annotations

import dataclasses
import enum
import inspect
import types
import typing
from collections.abc import Mapping
from typing import Any

_HIGHEST = 2**63 - 1
_SCALARS: Mapping[type, dict[str, Any]] = types.MappingProxyType(
    {
        int: {"type": "integer", "minimum": -_HIGHEST, "maximum": _HIGHEST},
        float: {"type": "number"},
        str: {"type": "string"},
        bool: {"type": "boolean"},
    }
)


def json_schema(kind: type) -> dict[str, Any]:
    """Return the JSON schema of `kind`, valid under drafts 7 and 2020-12. Docstrings become descriptions."""
    definitions: dict[str, Any] = {}
    top = _schema(kind, definitions)
    return {**definitions.pop(top["$ref"].rpartition("/")[2]), "definitions": dict(sorted(definitions.items()))}


def _schema(kind: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _reference(kind, definitions)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return {"enum": [member.name.lower() for member in kind]}
    if origin in (typing.Union, types.UnionType):
        (inner,) = (arg for arg in args if arg is not type(None))
        return {"anyOf": [_schema(inner, definitions), {"type": "null"}]}
    if origin is tuple and args[-1] is Ellipsis:
        return {"type": "array", "items": _schema(args[0], definitions)}
    if origin is tuple:
        items = [_schema(arg, definitions) for arg in args]
        return {"type": "array", "items": items, "minItems": len(items), "maxItems": len(items)}
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return {"type": "object", "additionalProperties": _schema(args[1], definitions)}
    return dict(_SCALARS[kind])


def _reference(kind: type, definitions: dict[str, Any]) -> dict[str, Any]:
    reference = {"$ref": f"#/definitions/{kind.__name__}"}
    if kind.__name__ in definitions:
        return reference
    definitions[kind.__name__] = {}  # ends the recursion for a type that contains itself
    fields, hints = [f for f in dataclasses.fields(kind) if f.compare], typing.get_type_hints(kind)
    definitions[kind.__name__] = {
        "type": "object",
        "description": inspect.cleandoc(kind.__doc__ or ""),
        "properties": {f.name: _schema(hints[f.name], definitions) for f in fields},
        "required": [f.name for f in fields if f.default is dataclasses.MISSING],
        "additionalProperties": False,
    }
    return reference
