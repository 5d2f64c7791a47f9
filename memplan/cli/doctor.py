"""`memplan doctor`: shows what is installed, which devices there are, and what is missing."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from memplan.cli.console import Format, opt, show, stages

_NEEDED = {
    "numpy": "solvers",
    "numba": "fast search of the portfolio solver",
    "ortools": "minimum cuts that prove orders",
    "networkx": "Graph.to_networkx",
}
_OPTIONAL = {
    "torch": "plans and runs models: pip install 'memplan[torch]'",
    "transformers": "the callback for its Trainer, models of the zoo",
    "diffusers": "UNet of the zoo",
    "lightning": "the callback for its Trainer",
    "pytest": "the marker and the fixture `memplan`",
}

Line = tuple[str, str, bool | None, str]
"""A part that was looked for, what was found, whether that is well (None: optional and absent), and its use."""


def doctor(as_json: Annotated[bool, opt("--json", "Print it as JSON, for bug reports.")] = False) -> None:
    """Show versions, devices and optional parts, and what works here: each of memplan's ways is tried on a small model.

    Exits 1 when something that memplan needs is missing.
    """
    from memplan.report.sections import Form, Section, columns

    with stages("Looking around"):
        lines = [*_system(), *_packages(), *_of_torch(), _solves()]
    marks = {True: "ok", False: "MISSING", None: "-"}
    rows = tuple((marks[ok], what, found, use) for what, found, ok, use in lines)
    data = [dict(zip(("what", "found", "ok", "remark"), line, strict=True)) for line in lines]
    shown = Section(columns=columns("_ part found for@60"), rows=rows)
    show(Form(title="", sections=(shown,), data=data), Format.JSON if as_json else Format.TABLE)
    if any(ok is False for _, _, ok, _ in lines):
        raise typer.Exit(1)


def _system() -> Iterator[Line]:
    from memplan.core.host_limit import host_memory
    from memplan.core.units import format_bytes
    from memplan.version import __version__

    has = host_memory()
    memory = "" if has is None else f", {format_bytes(has)}"
    yield "memplan", __version__, True, ""
    yield "python", platform.python_version(), sys.version_info >= (3, 11), "3.11 or later"
    yield "system", f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores{memory}", True, ""


def _packages() -> Iterator[Line]:
    import importlib.metadata
    import importlib.util

    for name, use in {**_NEEDED, **_OPTIONAL}.items():
        if importlib.util.find_spec(name) is None:
            yield name, "not installed", False if name in _NEEDED else None, use
        else:
            yield name, importlib.metadata.version(name), True, use


def _of_torch() -> Iterator[Line]:
    """Yield a line for each device of torch, and for each way to plan, by another process: torch is slow to import."""
    import importlib.util
    import json
    import subprocess

    if importlib.util.find_spec("torch") is None:
        return
    code = "import json; from memplan.integrations.works_here import look_at_torch; print(json.dumps(look_at_torch()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield "device", "torch cannot be imported", False, last[:200]
        return
    for found in json.loads(done.stdout.splitlines()[-1]):
        yield found["what"], found["found"], found["ok"], found.get("remark", "")


def _solves() -> Line:
    """Return a line on a small problem that is solved and validated."""
    from memplan.core.problem import Buffer, Interval, Problem
    from memplan.solvers import solve

    buffers = tuple(Buffer(id=str(i), size=64 * (i % 5 + 1), live=Interval(i, i + 4)) for i in range(20))
    solution = solve(Problem(buffers=buffers))
    return "solve", f"{solution.status.name.lower()} by {solution.solver!r}", True, ""
