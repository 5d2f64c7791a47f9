"""Symbolic plans as JSON files, as strict as `memplan.planning.planfile`, and apart from the files of resolved plans."""

from __future__ import annotations

import os
from pathlib import Path

from memplan.core.files import write_atomic
from memplan.planning.planfile import FileFormat
from memplan.symbolic.plan import SymbolicPlan, check_whole, whole_as_loaded

SYMBOLIC_VERSION = 1
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
    """Write `plan` to `path` as JSON in one step. Raises `UnreadableFile` when that cannot be done.

    Equal plans give equal bytes.
    """
    write_atomic(Path(path), _FORM.text(plan))


def load_symbolic(path: str | os.PathLike[str]) -> SymbolicPlan:
    """Read a symbolic plan and check every part against the others, the plan of the hint by the independent validator.

    Raises `UnreadableFile` when the file cannot be read or parsed, `InvalidPlan` (with the path of the first fault)
    when its content is no symbolic plan of this version, `InvalidSolution` when its offsets are bad.
    """
    return _FORM.read(path)
