"""Reads `[tool.memplan]` in pyproject.toml: which models of a repository are checked, and against which limits.

[tool.memplan]
models = [
    "model.py:gpt2",
    { target = "model.py:gpt2", gpu = "h100" },          # its plan for that GPU, which need not be here
    { target = "model.py:gpt2", name = "gpt2 by SGD", optimizer = "SGD" },  # AdamW unless said; "none"
    { target = "model.py:vit", infer = true, fail-over = ["arena:12MiB"] },
]
baseline = ".memplan-baseline.json"      # relative to the file's folder, like the models
fail-over = ["arena:+2%", "outside:+0"]
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.analysis.needs import OPTIMIZER
from memplan.check.check import Rule, parse_rule
from memplan.core.jsonio import clip, show
from memplan.errors import InvalidPlan, UnreadableFile, located

_HINT = (
    'as in: [tool.memplan] models = ["model.py:make"], baseline = ".memplan-baseline.json", fail-over = ["arena:+2%"]'
)
_PROJECT: dict[str, type] = {"models": list, "baseline": str, "fail-over": list}
_ENTRY: dict[str, type] = {"target": str, "name": str, "infer": bool, "gpu": str, "optimizer": str, "fail-over": list}
_KINDS = {list: "a list", str: "a text", bool: "true or false"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A model (or a saved plan) to check.

    `name` is its key in the baseline, `target` names it from the working directory; `gpu` is one that need not be here,
    for which it is planned; `optimizer` is whose state the total has; `rules` are its own, or None for the project's.
    """

    name: str
    target: str
    infer: bool = False
    gpu: str | None = None
    optimizer: str = OPTIMIZER
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
        if file.is_file():
            try:
                tool = tomllib.loads(file.read_text(encoding="utf-8")).get("tool", {})
            except (OSError, ValueError) as error:
                raise UnreadableFile(f"cannot be read: {error}", where=str(file)) from error
            if isinstance(tool, dict) and "memplan" in tool:
                return _project(file, tool["memplan"], start)
    return None


def _project(file: Path, table: Any, start: Path) -> Project:
    at = f"{file}: tool.memplan"
    _require(at, table, _PROJECT)
    models = table.get("models", [])
    entries = tuple(_entry(f"{at}.models[{i}]", model, file.parent, start) for i, model in enumerate(models))
    names = [entry.name for entry in entries]
    twin = next((name for name in names if names.count(name) > 1), None)
    if twin is not None:
        raise InvalidPlan(f"two models have the name {twin!r}", where=f"{at}.models", hint=_HINT)
    baseline = file.parent / table["baseline"] if "baseline" in table else None
    return Project(file=file, entries=entries, baseline=baseline, rules=_rules(at, table))


def _entry(at: str, data: Any, folder: Path, start: Path) -> Entry:
    fields: Any = {"target": data} if isinstance(data, str) else data
    _require(at, fields, _ENTRY)
    if "target" not in fields:
        raise InvalidPlan("there is no target", where=f"{at}.target", hint=_HINT)
    gpu = fields.get("gpu")
    target = fields["target"]
    name = fields.get("name", target if gpu is None else f"{target} on {gpu}")
    path = target.rpartition(":")[0] if ".py:" in target else target
    if folder != start and path.endswith((".py", ".json")):  # named from the project's folder; a module is not
        target = str(folder / target)
    how = {key: fields[key] for key in ("infer", "gpu", "optimizer") if key in fields}
    return Entry(name=name, target=target, rules=_rules(at, fields), **how)


def _rules(at: str, table: dict[str, Any]) -> tuple[Rule, ...] | None:
    texts = table.get("fail-over")
    if texts is None:
        return None
    if not all(isinstance(text, str) for text in texts):
        raise InvalidPlan(f"{show(texts)} is not a list of texts", where=f"{at}.fail-over", hint=_HINT)
    with located(f"{at}.fail-over"):
        return tuple(map(parse_rule, texts))


def _require(at: str, table: Any, kinds: dict[str, type]) -> None:
    """Raise `InvalidPlan` unless `table` is one, whose keys are those of `kinds` and have values of their kinds."""
    if not isinstance(table, dict):
        raise InvalidPlan(f"{show(table)} is not a table", where=at, hint=_HINT)
    for key, value in table.items():
        if key not in kinds:
            what = f"unknown key; known are {', '.join(kinds)}"
            raise InvalidPlan(what, where=f"{at}.{clip(key)}", hint=_HINT)
        if not isinstance(value, kinds[key]):
            raise InvalidPlan(f"{show(value)} is not {_KINDS[kinds[key]]}", where=f"{at}.{key}", hint=_HINT)
