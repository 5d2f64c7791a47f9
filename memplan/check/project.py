"""Reads `[tool.memplan]` in pyproject.toml: which models of a repository are checked, and against which limits.

[tool.memplan]
models = ["model.py:gpt2", { target = "model.py:vit", infer = true, fail-over = ["arena:12MiB"] }]
baseline = ".memplan-baseline.json"      # relative to the file's folder, like the models
fail-over = ["arena:+2%", "outside:+0"]
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.check.rules import Rule, parse_rule
from memplan.core.jsonio import clip, show
from memplan.errors import InvalidPlan, InvalidSize, UnreadableFile

_HINT = (
    'as in: [tool.memplan] models = ["model.py:make"], baseline = ".memplan-baseline.json", fail-over = ["arena:+2%"]'
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model (or a saved plan) to check.

    `name` is its key in the baseline, `target` names it from the working directory; `rules` are its own, or None for
    the project's.
    """

    name: str
    target: str
    infer: bool = False
    rules: tuple[Rule, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Project:
    """The content of `[tool.memplan]`; `rules` is None if it gives none."""

    file: Path
    entries: tuple[Entry, ...]
    baseline: Path | None
    rules: tuple[Rule, ...] | None


def find_project(start: Path) -> Project | None:
    """Return the project of the nearest pyproject.toml with `[tool.memplan]` in `start` or above it, None without one.

    Raises `InvalidPlan`, which names the first fault.
    """
    for folder in (start, *start.parents):
        file = folder / "pyproject.toml"
        if file.is_file() and (table := _table(file)) is not None:
            return _project(file, table, start)
    return None


def _table(file: Path) -> dict[str, Any] | None:
    try:
        tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise UnreadableFile(f"cannot be read: {error}", where=str(file)) from error
    table = tool.get("memplan") if isinstance(tool, dict) else None
    if table is not None and not isinstance(table, dict):
        raise _wrong(file, "", table, "a table")
    return table


def _project(file: Path, table: dict[str, Any], start: Path) -> Project:
    _known(file, "", table, ("models", "baseline", "fail-over"))
    models = table.get("models", [])
    if not isinstance(models, list):
        raise _wrong(file, "models", models, "a list")
    baseline = table.get("baseline")
    if baseline is not None and not isinstance(baseline, str):
        raise _wrong(file, "baseline", baseline, "a file's name")
    entries = tuple(_entry(file, f"models[{i}]", model, start) for i, model in enumerate(models))
    names = [entry.name for entry in entries]
    for name in names:
        if names.count(name) > 1:
            raise InvalidPlan(f"two models have the name {name!r}", where=f"{file}: tool.memplan.models", hint=_HINT)
    return Project(
        file=file,
        entries=entries,
        baseline=None if baseline is None else file.parent / baseline,
        rules=_rules(file, "fail-over", table.get("fail-over")),
    )


def _entry(file: Path, where: str, data: Any, start: Path) -> Entry:
    fields = {"target": data} if isinstance(data, str) else data
    if not isinstance(fields, dict):
        raise _wrong(file, where, data, "a text or a table")
    _known(file, where, fields, ("target", "name", "infer", "fail-over"))
    target, infer = fields.get("target"), fields.get("infer", False)
    name = fields.get("name", target)
    if not isinstance(target, str) or not isinstance(name, str):
        raise _wrong(file, f"{where}.target", target, "a text")
    if not isinstance(infer, bool):
        raise _wrong(file, f"{where}.infer", infer, "true or false")
    rules = _rules(file, f"{where}.fail-over", fields.get("fail-over"))
    return Entry(name=name, target=_from_here(file.parent, target, start), infer=infer, rules=rules)


def _from_here(folder: Path, target: str, start: Path) -> str:
    """Return a target that is relative to the project's folder as it is named from `start`; modules are unchanged."""
    path = target.rpartition(":")[0] if ".py:" in target else target
    return str(folder / target) if folder != start and path.endswith((".py", ".json")) else target


def _rules(file: Path, where: str, data: Any) -> tuple[Rule, ...] | None:
    if data is None:
        return None
    if not isinstance(data, list) or not all(isinstance(text, str) for text in data):
        raise _wrong(file, where, data, "a list of texts")
    try:
        return tuple(parse_rule(text) for text in data)
    except InvalidSize as error:
        error.where = f"{file}: tool.memplan.{where}"
        raise


def _known(file: Path, where: str, table: dict[str, Any], keys: tuple[str, ...]) -> None:
    for key in table:
        if key not in keys:
            at = f"{file}: tool.memplan{'.' + where if where else ''}.{clip(key)}"
            raise InvalidPlan(f"unknown key; known are {', '.join(keys)}", where=at, hint=_HINT)


def _wrong(file: Path, where: str, data: object, expected: str) -> InvalidPlan:
    at = f"{file}: tool.memplan{'.' + where if where else ''}"
    return InvalidPlan(f"{show(data)} is not {expected}", where=at, hint=_HINT)
