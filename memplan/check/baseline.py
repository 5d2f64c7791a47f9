"""Baselines: the figures of many plans in one small file that is committed to the repository.

It has one line per row of buffers, and keys in the order of the models, so that a change is easy to review.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from memplan.analysis.rows import Figures
from memplan.core.files import write_atomic
from memplan.core.jsonio import clip, from_json, read_json, show, to_json
from memplan.errors import InvalidPlan, located

FORMAT = "memplan-baseline-1"
_HINT = "write it anew: memplan check ... --baseline FILE --update-baseline"


def read_baseline(path: str | os.PathLike[str]) -> Mapping[str, Figures]:
    """Return the figures of a baseline by model.

    Raises `UnreadableFile` for a file that is missing or no JSON, `InvalidPlan`, which names the first fault.
    """
    where, data = os.fspath(path), read_json(path, _HINT)
    if not isinstance(data, dict) or data.get("format") != FORMAT or not isinstance(data.get("models"), dict):
        said = show(data.get("format")) if isinstance(data, dict) else "none"
        raise InvalidPlan(f"is not a baseline of format {FORMAT!r}: it says {said}", where=where, hint=_HINT)
    with located(where, _HINT):
        figures = {name: _figures(value, f"models.{clip(name)}") for name, value in data["models"].items()}
    return MappingProxyType(figures)


def _figures(data: object, where: str) -> Figures:
    figures = from_json(Figures, data, where)
    sizes = (figures.max_live, figures.outside, figures.lost, *figures.parts.values(), *(g.bytes for g in figures.peak))
    if min(sizes) < 0 or sum(g.bytes for g in figures.peak) != figures.max_live:
        raise InvalidPlan("the figures contradict each other", where=where)
    return figures


def write_baseline(path: str | os.PathLike[str], models: Mapping[str, Figures]) -> None:
    """Write `models` to `path`, whole or not at all. Raises `UnreadableFile` when it cannot be written."""
    write_atomic(path, baseline_text(models))


def update_baseline(
    path: str | os.PathLike[str], models: Mapping[str, Figures], *, whole: bool = False
) -> Mapping[str, Figures]:
    """Add or replace the figures of `models` in a baseline, or write only them (`whole`); return the previous figures.

    Raises as `read_baseline` and `write_baseline` do.
    """
    file = Path(path)
    before = read_baseline(file) if file.exists() else {}
    write_baseline(file, models if whole else {**before, **models})
    return before


def baseline_text(models: Mapping[str, Figures]) -> str:
    """Return the content of a baseline file; equal figures give equal bytes."""
    entries = ",\n".join(f"  {_line(name)}: {_entry(to_json(figures))}" for name, figures in models.items())
    return f'{{\n "format": {_line(FORMAT)},\n "models": {{\n{entries}\n }}\n}}\n'


def _entry(figures: dict[str, Any]) -> str:
    rows = ",\n".join(f"    {_line(row)}" for row in figures.pop("peak"))
    figures["parts"] = dict(figures["parts"])
    head = "".join(f"   {_line(key)}: {_line(value)},\n" for key, value in figures.items())
    return f'{{\n{head}   "peak": [\n{rows}\n   ]\n  }}'


def _line(value: object) -> str:
    return json.dumps(value, allow_nan=False)
