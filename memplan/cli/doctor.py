"""`memplan doctor`: shows what is installed, which devices there are, and what is missing."""

from __future__ import annotations

import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from memplan.cli.console import console, progress

_PARTS = (
    ("torch", "plans and runs models: pip install 'memplan[torch]'", False),
    ("numpy", "solvers", True),
    ("numba", "fast search of the portfolio solver", True),
    ("ortools", "minimum cuts that prove orders; CP-SAT, the exact solver", True),
    ("networkx", "reports of whole steps, Graph.to_networkx, check --verify", True),
    ("transformers", "fits --hf, the callback for its Trainer, models of the zoo", False),
    ("diffusers", "UNet of the zoo", False),
    ("lightning", "the callback for its Trainer", False),
    ("PIL", "report --png and solve --plot FILE.png: pip install 'memplan[png]'", False),
    ("pytest", "the marker and the fixture `memplan`", False),
)


_PROJECTS = {"PIL": "pillow"}  # packages whose project has another name


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of the result; `ok` is None for an optional part that is absent."""

    what: str
    found: str
    ok: bool | None
    remark: str = ""


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON, for bug reports.")] = False,
) -> None:
    """Show versions, devices and optional parts, and what works here: each of memplan's ways is tried on a small model.

    Exits 1 when something that memplan needs is missing.
    """
    with progress("Looking around"):
        lines = [*_system(), *_packages(), *_of_torch(), _solves()]
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=2))
    else:
        _print(lines)
    if any(line.ok is False for line in lines):
        raise typer.Exit(1)


def _system() -> list[Line]:
    from memplan.version import __version__

    new_enough = sys.version_info >= (3, 11)
    memory = _memory()
    return [
        Line(what="memplan", found=__version__, ok=True),
        Line(what="python", found=platform.python_version(), ok=new_enough, remark="" if new_enough else "needs 3.11"),
        Line(what="system", found=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{memory}", ok=True),
    ]


def _memory() -> str:
    from memplan.core.units import format_bytes

    try:
        return f", {format_bytes(os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES'))}"
    except (ValueError, OSError, AttributeError):  # the system does not report its memory
        return ""


def _packages() -> list[Line]:
    import importlib.metadata
    import importlib.util
    import shutil

    lines = []
    for name, use, needed in _PARTS:
        there = importlib.util.find_spec(name) is not None
        try:
            version = importlib.metadata.version(_PROJECTS.get(name, name)) if there else "not installed"
        except importlib.metadata.PackageNotFoundError:
            version = "installed"
        lines.append(
            Line(
                what=_PROJECTS.get(name, name),
                found=version,
                ok=True if there else (False if needed else None),
                remark=use,
            )
        )
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    lines.append(
        Line(what="chromium", found=chromium or "not installed", ok=bool(chromium) or None, remark="tests of the page")
    )
    return lines


def _of_torch() -> list[Line]:
    """Return a line for each device of torch, and for each way to plan, by another process: torch is slow to import."""
    import importlib.util
    import subprocess

    if importlib.util.find_spec("torch") is None:
        return []
    code = "import json; from memplan.integrations.works_here import look_at_torch; print(json.dumps(look_at_torch()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return [Line(what="device", found="torch cannot be imported", ok=False, remark=last[:200])]
    return [Line(**found) for found in json.loads(done.stdout.splitlines()[-1])]


def _solves() -> Line:
    """Return a line on a small problem that is solved and validated."""
    from memplan.core.problem import Buffer, Interval, Problem
    from memplan.solvers import solve

    buffers = tuple(Buffer(id=str(i), size=64 * (i % 5 + 1), live=Interval(i, i + 4)) for i in range(20))
    solution = solve(Problem(buffers=buffers))
    return Line(what="solve", found=f"{solution.status.name.lower()} by {solution.solver!r}", ok=True)


def _print(lines: list[Line]) -> None:
    from rich.text import Text

    from memplan.report.lines import printable
    from memplan.report.table import NARROW, new_table

    table, screen = new_table(), console()
    names = ("", "part", "found", "for") if screen.width >= NARROW else ("", "part", "found")
    for name in names:
        table.add_column(name, overflow="fold")
    marks = {True: Text("ok", "green"), False: Text("MISSING", "bold red"), None: Text("-", "dim")}
    for line in lines:
        texts = (line.what, line.found, line.remark)[: len(names) - 1]
        table.add_row(marks[line.ok], *(Text(printable(text)) for text in texts))
    screen.print(table)
