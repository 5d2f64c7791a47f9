"""No circle of imports, torch's internals in one room, and code lines within the limits of each room."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx
import pytest

from scripts.size import code_lines, excesses, rooms

ROOT = Path(__file__).parent.parent / "memplan"


def _modules() -> dict[str, Path]:
    """The files of memplan by the name of their module."""
    found = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def _for_types(tree: ast.Module) -> set[int]:
    """The ids of the nodes below `if TYPE_CHECKING`."""
    blocks = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    return {id(node) for block in blocks for part in block.body for node in ast.walk(part)}


def _imported(source: str, known: Mapping[str, object]) -> Iterator[str]:
    """Yield what a file imports when it is loaded or later; of one that calls `import_module`, every module it names.

    A name may be what follows the beginning of an f-string: `import_module(f"memplan.evict.{module}")`.
    """
    tree = ast.parse(source)
    types, names = _for_types(tree), [n for n in ast.walk(tree) if isinstance(n, ast.Name | ast.Attribute)]
    loads = any((n.id if isinstance(n, ast.Name) else n.attr) in ("import_module", "__import__") for n in names)
    firsts = [n.values[0] for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) and n.values]
    starts = ["", *(str(n.value) for n in firsts if isinstance(n, ast.Constant))]
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in whole)
        elif loads and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from (start + node.value for start in starts)


def _circles(sources: Mapping[str, str]) -> list[list[str]]:
    """The groups of modules that reach each other."""
    graph = networkx.DiGraph()
    for module, source in sources.items():
        graph.add_edges_from((module, other) for other in _imported(source, sources) if other in sources)
    loops = list(networkx.selfloop_edges(graph))
    graph.remove_edges_from(loops)
    return [sorted(found) for found in networkx.strongly_connected_components(graph) if len(found) > 1]


def test_circles_are_found_whatever_way_a_module_is_imported() -> None:
    back = {
        "when loaded": "import a",
        "from it": "from a import x",
        "later": "def f():\n    from a import x",
        "by name": "from importlib import import_module\nimport_module('a')",
        "from a table": "import importlib\nHOMES = {'x': 'a'}\nimportlib.import_module(HOMES['x'])",
    }
    for how, source in back.items():
        assert _circles({"a": "import b", "b": source}) == [["a", "b"]], how
    package = "from importlib import import_module\ndef f(m): return import_module(f'p.{m}')\nf('c')"
    assert _circles({"p.c": "from p import d", "p.d": package}) == [["p.c", "p.d"]]
    assert not _circles({"a": "import b", "b": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a"})


def test_no_circle_of_files() -> None:
    sources = {name: path.read_text(encoding="utf-8") for name, path in _modules().items()}
    assert len(sources) > 200
    assert not _circles(sources)


def test_core_names_no_room_above_it() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"core", "__pycache__"}
    for path in (ROOT / "core").glob("*.py"):
        named = {name.split(".")[1] for name in _imported(path.read_text(), _modules()) if name.startswith("memplan.")}
        assert not named & rooms, path.name


INTERNALS = ("torch._dynamo", "torch._functorch", "torch._inductor", "torch._subclasses")
# The room; that of Inductor's code, which is read and written there; what runs inside of Inductor; and that in which
# torch sees a GPU that is not here.
ROOMS = ("torch_inside/", "trace/fused/", "integrations/partitioner.py", "targets/")


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


_SOURCE = '''"""A module."""

import os  # one

# nothing
def f(
    x: int,
) -> int:
    """Do it.

    Twice.
    """
    text = """two
lines"""
    return len(text) + x  # six with the signature's three and the text's two
'''


def test_comments_blank_lines_and_docstrings_are_no_code() -> None:
    assert code_lines(_SOURCE) == 1 + 3 + 2 + 1


@pytest.mark.parametrize(("limit", "code", "word"), [(7, 0, ""), (6, 1, "core: 7 code lines, 1 above its limit of 6")])
def test_a_room_above_its_limit_fails(tmp_path: Path, limit: int, code: int, word: str) -> None:
    (tmp_path / "memplan" / "core").mkdir(parents=True)
    (tmp_path / "memplan" / "core" / "it.py").write_text(_SOURCE)
    (tmp_path / "pyproject.toml").write_text(f"[tool.size]\ncore = {limit}\n")
    command = [sys.executable, "-m", "scripts.size", "--root", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr.strip().startswith(word)) == (code, True)


def test_a_room_needs_a_limit() -> None:
    found = rooms(ROOT)
    assert len(found) > 10
    first, *others = found
    assert [line.split(":")[0] for line in excesses(found, dict.fromkeys(others, 10**6))] == [first]
