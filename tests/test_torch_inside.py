"""Torch's internals are named in one room, so that a new release of torch is met there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent / "memplan"
INTERNALS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")
# The room; the rooms of Inductor's code, which is read and written there, and that runs inside of Inductor; and that in
# which torch sees a GPU that is not here.
ROOMS = ("torch_inside/", "trace/fused/", "integrations/inductor/", "targets/")


def _names(source: str) -> Iterator[str]:
    """Yield what a module imports, and the attributes that it reads, by their whole names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def _files() -> Iterator[tuple[str, str]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")


def test_torchs_internals_are_named_in_their_rooms_alone() -> None:
    naming = {file for file, source in _files() if any(name.startswith(INTERNALS) for name in _names(source))}
    assert naming, "nothing is looked for"
    assert {file for file in naming if not file.startswith(ROOMS)} == set()
