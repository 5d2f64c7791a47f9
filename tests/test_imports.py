"""No file of memplan imports another one that imports it, however late, and by whatever way."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import networkx

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
    assert len(sources) > 300
    assert not _circles(sources)


def test_core_names_no_room_above_it() -> None:
    rooms = {path.name for path in ROOT.iterdir() if path.is_dir()} - {"core", "__pycache__"}
    for path in (ROOT / "core").glob("*.py"):
        named = {name.split(".")[1] for name in _imported(path.read_text(), _modules()) if name.startswith("memplan.")}
        assert not named & rooms, path.name
