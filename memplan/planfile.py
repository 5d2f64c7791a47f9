"""Plans as JSON files: strict in what is read, whole or absent in what is written."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from memplan.csvio import write_atomic
from memplan.errors import InvalidPlan, UnreadableFile
from memplan.jsonio import from_json, to_json
from memplan.plan import SCHEMA_VERSION, Plan, check_consistency

_HINT = "make the plan anew: memplan.plan(model, example_inputs).save(path)"


def save(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` when that cannot be done."""
    data = {"schema_version": SCHEMA_VERSION, "fingerprint": plan.fingerprint, **to_json(plan)}
    write_atomic(Path(path), json.dumps(data, separators=(",", ":"), allow_nan=False) + "\n")


def load(path: str | os.PathLike[str]) -> Plan:
    """Read a plan and check it against its own graph and the independent validator.

    Raises `UnreadableFile` when the file cannot be read or parsed, `InvalidPlan` (with the path of the first
    fault) when its content is not a plan of this schema version, `InvalidSolution` when its offsets are bad.
    """
    where = os.fspath(path)
    try:
        data = json.loads(Path(path).read_bytes(), parse_constant=_refuse_constant)
    except OSError as error:
        raise UnreadableFile(f"cannot be read: {error}", where=str(where)) from error
    except (ValueError, RecursionError) as error:
        raise UnreadableFile(f"is not JSON: {error}", where=str(where), hint=_HINT) from error
    if not isinstance(data, dict):
        raise InvalidPlan("is not a plan: the top level is no object", where=str(where), hint=_HINT)
    version, fingerprint = data.pop("schema_version", None), data.pop("fingerprint", None)
    if version != SCHEMA_VERSION:
        raise InvalidPlan(
            f"has schema version {version!r}, this memplan reads {SCHEMA_VERSION}", where=str(where), hint=_HINT
        )
    plan = from_json(Plan, data, "plan")
    check_consistency(plan)
    if fingerprint != plan.fingerprint:
        raise InvalidPlan("does not belong to the graph of this file", where="plan.fingerprint", hint=_HINT)
    return plan


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")
