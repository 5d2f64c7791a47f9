"""Prints the code lines of memplan/, by room, and exits 1 where a room has more than pyproject.toml allows.

    python -m scripts.size [--root FOLDER]

A code line has a token of Python other than a comment; docstrings do not count. A room is a folder of memplan/; "." are
the files beside them. `[tool.size]` in pyproject.toml has the limit of each room: one that shrinks gets a lower limit,
and one that needs more says why in the commit that raises it. The idea is that of tinygrad's `sz.py`.
"""

from __future__ import annotations

import argparse
import ast
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_NO_CODE = frozenset(
    (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
)


def code_lines(source: str) -> int:
    """Return how many lines of a module's source hold code: no blank lines, comments or docstrings."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(
            node, clean=False
        ):
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def rooms(package: Path) -> dict[str, tuple[int, int]]:
    """Return the code lines and the files of each room of `package`."""
    found: dict[str, tuple[int, int]] = {}
    for path in sorted(package.rglob("*.py")):
        inside = path.relative_to(package).parts
        room = inside[0] if len(inside) > 1 else "."
        lines, files = found.get(room, (0, 0))
        found[room] = lines + code_lines(path.read_text(encoding="utf-8")), files + 1
    return found


def excesses(found: Mapping[str, tuple[int, int]], limits: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each room that is above its limit, or that has none."""
    for room, (lines, _) in found.items():
        if room not in limits:
            yield f"{room}: no limit in [tool.size] of pyproject.toml; add one"
        elif lines > limits[room]:
            yield f"{room}: {lines} code lines, {lines - limits[room]} above its limit of {limits[room]}"


def main() -> int:
    """Run the script; return its exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout (default: this one)")
    root: Path = parser.parse_args().root
    limits: dict[str, int] = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["size"]
    found = rooms(root / "memplan")
    print(f"{'room':15} {'lines':>6} {'limit':>6} {'files':>6}")
    for room, (lines, files) in found.items():
        print(f"{room:15} {lines:6} {limits.get(room, 0):6} {files:6}")
    lines, files = (sum(column) for column in zip(*found.values(), strict=True))
    print(f"{'memplan':15} {lines:6} {sum(limits.values()):6} {files:6}")
    above = list(excesses(found, limits))
    print("\n".join(above), end="\n" if above else "", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
