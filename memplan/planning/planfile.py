"""Reads and writes plans as JSON files. Reading is strict; writing is all or nothing.

`schema_version` comes first, then `fingerprint` (of the graph) and `checksum` (of everything after it, as compact JSON
with sorted keys): a file that was changed by accident is refused. The checksum does not protect against intended
changes, so every part of a file is also checked against the others.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from memplan.core.files import write_atomic
from memplan.core.jsonio import clip, from_json, show, to_json
from memplan.core.jsonschema import json_schema
from memplan.core.plan import SCHEMA_VERSION, Plan, as_loaded
from memplan.errors import InvalidPlan, MemplanError, UnreadableFile
from memplan.planning.consistency import check_consistency

_READERS = {"schema_version": "read it with memplan.load", "symbolic_version": "read it with memplan.load_symbolic"}


class OfGraph(Protocol):
    """The contents of a plan file, which belong to one graph."""

    @property
    def fingerprint(self) -> str:
        """The fingerprint of the graph."""
        ...


_Held = TypeVar("_Held", bound=OfGraph)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFormat(Generic[_Held]):
    """A kind of plan file: a head (version, fingerprint, checksum), followed by the JSON of a `holds`.

    `called` and `version_of` name the kind and its version in errors, `root` begins the paths in errors. `check` raises
    unless all parts of the contents agree; `mark` marks as claimed the bounds that `check` did not prove; `hint` tells
    the user how to make such a file.
    """

    holds: type[_Held]
    called: str
    version_of: str
    version: int
    root: str
    check: Callable[[_Held], None]
    mark: Callable[[_Held], _Held]
    hint: str

    @property
    def key(self) -> str:
        """The key of the version in the head."""
        return f"{self.version_of}_version"

    def text(self, held: _Held) -> str:
        """Return the text of a file. Equal contents give equal bytes."""
        body = to_json(held)
        head = {self.key: self.version, "fingerprint": held.fingerprint, "checksum": checksum(body)}
        return json.dumps({**head, **body}, separators=(",", ":"), allow_nan=False) + "\n"

    def read(self, path: str | os.PathLike[str]) -> _Held:
        """Read the contents of a file. Errors name the file and the next step; they are those of `load`."""
        where = os.fspath(path)
        data = _parse(where, self.hint)
        try:
            return self._made(data)
        except MemplanError as error:
            error.where = f"{where}: {error.where}" if error.where else where
            error.hint = error.hint or self.hint
            raise

    def _made(self, data: dict[str, Any]) -> _Held:
        """Make the contents from parsed JSON and check that all parts agree. Removes the head from `data`."""
        version, fingerprint, said = (data.pop(key, None) for key in (self.key, "fingerprint", "checksum"))
        if type(version) is not int:
            hint = next((hint for key, hint in _READERS.items() if key in data), None)
            raise InvalidPlan(f"is not a {self.called}: it has no {self.key}", hint=hint)
        if version != self.version:
            raise InvalidPlan(f"has {self.version_of} version {show(version)}, this memplan reads {self.version}")
        held = from_json(self.holds, data, self.root)
        if said != checksum(data):
            raise InvalidPlan("the file was changed or damaged after it was written", where=f"{self.root}.checksum")
        self.check(held)
        if fingerprint != held.fingerprint:
            raise InvalidPlan("does not belong to the graph of this file", where=f"{self.root}.fingerprint")
        return self.mark(held)


_PLAN = FileFormat(
    holds=Plan,
    called="plan",
    version_of="schema",
    version=SCHEMA_VERSION,
    root="plan",
    check=check_consistency,
    mark=as_loaded,
    hint="make the plan anew: memplan.plan(model, example_inputs).save(path)",
)


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` if the file cannot be written.

    Equal plans give equal bytes.
    """
    write_atomic(Path(path), to_text(plan))


def to_text(plan: Plan) -> str:
    """Return the text of the plan file of `plan`."""
    return _PLAN.text(plan)


def checksum(body: dict[str, Any]) -> str:
    """SHA-256 (hex) of a plan's JSON without its head; independent of whitespace and of the order of keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def schema() -> dict[str, Any]:
    """Return the JSON schema of a plan file, made from the dataclasses. `plan.schema.json` in this package is a copy of
    it.

    The schema describes the form of a plan file. `load` also checks its meaning: it can refuse a file that matches the
    schema.
    """
    plan = json_schema(Plan)
    head = {
        "schema_version": {"const": SCHEMA_VERSION},
        "fingerprint": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of the graph"},
        "checksum": {"type": "string", "pattern": "^[0-9a-f]{64}$", "description": "SHA-256 of all below it"},
    }
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": f"memplan plan file, version {SCHEMA_VERSION}",
        **plan,
        "properties": {**head, **plan["properties"]},
        "required": [*head, *plan["required"]],
    }


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a saved plan and check it against its own graph and with the independent validator.

    Bounds in the file that loading does not prove again are marked as claimed (see `Plan`).

    Args:
        path: a file written by `Plan.save`.

    Returns:
        The plan, equal to the one that was saved.

    Raises:
        UnreadableFile: the file cannot be read or is not JSON.
        InvalidPlan: the content is not a plan of this schema version; names the path of the first fault.
        InvalidSolution: the offsets are invalid.

    Example:
        >>> plan = memplan.load("model.plan.json")
        >>> module = memplan.compile(model, example_inputs, plan=plan)
    """
    return _PLAN.read(path)


def _parse(where: str, hint: str) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises `UnreadableFile` or `InvalidPlan`, with `hint`, if the file holds none.
    """
    try:
        data = json.loads(
            Path(where).read_bytes(), parse_constant=_refuse_constant, object_pairs_hook=_refuse_duplicates
        )
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error.strerror or error}", where=where) from error
    except RecursionError as error:
        raise UnreadableFile("is not a plan: nested too deeply", where=where, hint=hint) from error
    except ValueError as error:
        raise UnreadableFile(f"is not JSON: {error}", where=where, hint=hint) from error
    if not isinstance(data, dict):
        raise InvalidPlan("is not a plan: the top level is not an object", where=where, hint=hint)
    return data


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [key for key, _ in pairs]
        twice = next(key for key in names if names.count(key) > 1)
        raise ValueError(f"key {clip(ascii(twice))} stands twice in one object")
    return found
