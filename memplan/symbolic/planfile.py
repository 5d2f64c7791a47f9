"""Symbolic plans as JSON files, as strict as `memplan.planfile`, and apart from the files of resolved plans."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memplan.csvio import write_atomic
from memplan.errors import InvalidPlan
from memplan.jsonio import from_json, show, to_json
from memplan.planfile import checksum, read
from memplan.symbolic.plan import SymbolicPlan, check_whole

SYMBOLIC_VERSION = 1
_HINT = "make the plan anew: memplan.plan(model, example_inputs, dynamic_shapes=...).save(path)"


def save_symbolic(plan: SymbolicPlan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` when that cannot be done.

    Equal plans give equal bytes.
    """
    body = to_json(plan)
    head = {"symbolic_version": SYMBOLIC_VERSION, "fingerprint": plan.fingerprint, "checksum": checksum(body)}
    write_atomic(Path(path), json.dumps({**head, **body}, separators=(",", ":"), allow_nan=False) + "\n")


def load_symbolic(path: str | os.PathLike[str]) -> SymbolicPlan:
    """Read a symbolic plan and check every part against the others, the plan of the hint by the independent validator.

    Raises `UnreadableFile` when the file cannot be read or parsed, `InvalidPlan` (with the path of the first fault)
    when its content is no symbolic plan of this version, `InvalidSolution` when its offsets are bad.
    """
    return read(path, _plan, _HINT)


def _plan(data: dict[str, Any]) -> SymbolicPlan:
    version, fingerprint, said = (data.pop(key, None) for key in ("symbolic_version", "fingerprint", "checksum"))
    if type(version) is not int:
        raise InvalidPlan("is not a symbolic plan: it has no symbolic_version", hint="read plans with memplan.load")
    if version != SYMBOLIC_VERSION:
        raise InvalidPlan(f"has symbolic version {show(version)}, this memplan reads {SYMBOLIC_VERSION}")
    made = from_json(SymbolicPlan, data, "symbolic")
    if said != checksum(data):
        raise InvalidPlan("the file was changed or damaged after it was written", where="checksum")
    check_whole(made)
    if fingerprint != made.fingerprint:
        raise InvalidPlan("does not belong to the graph of this file", where="fingerprint")
    return made
