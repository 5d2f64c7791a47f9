"""Reads and writes symbolic plans as JSON files, a format of its own, read as strictly as that of resolved plans."""

from __future__ import annotations

import os
from pathlib import Path

from memplan.core.files import write_atomic
from memplan.planning.planfile import FileFormat
from memplan.symbolic.plan import SymbolicPlan, check_whole, whole_as_loaded

SYMBOLIC_VERSION = 3
_FORM = FileFormat(
    holds=SymbolicPlan,
    called="symbolic plan",
    version_of="symbolic",
    version=SYMBOLIC_VERSION,
    root="symbolic",
    check=check_whole,
    mark=whole_as_loaded,
    hint="make the plan anew: memplan.plan(model, example_inputs, dynamic_shapes=...).save(path)",
)


def save_symbolic(plan: SymbolicPlan, path: str | os.PathLike[str]) -> None:
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` if the file cannot be written.

    Equal plans give equal bytes.
    """
    write_atomic(Path(path), _FORM.text(plan))


def load_symbolic(path: str | os.PathLike[str]) -> SymbolicPlan:
    """Read a saved symbolic plan and check its parts, with the independent validator for the plan of the hints.

    Args:
        path: a file written by `SymbolicPlan.save`.

    Returns:
        The symbolic plan, equal to the one that was saved.

    Raises:
        UnreadableFile: the file cannot be read or is not JSON.
        InvalidPlan: the content is not a symbolic plan of this version; names the path of the first fault.
        InvalidSolution: the offsets are invalid.

    Example:
        >>> symbolic = memplan.load_symbolic("model.plan.json")
        >>> plan = symbolic.resolve({"batch": 32})
    """
    return _FORM.read(path)
