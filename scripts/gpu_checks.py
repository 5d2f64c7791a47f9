"""Checks memplan on a CUDA device, the most doubtful first, each in a process of its own, and writes one JSON file.

    python -m scripts.gpu_checks --output checks.json [--limit 480] [--python PYTHON]

A check that fails, hangs or ends its process does not stop the others. The file is written again after each check, so
that a run that is cut off leaves what it knows; it says what passed, failed, ran out of time, was skipped or did not
run, and with which versions. Nothing is downloaded. Exits 1 unless all checks passed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 480.0  # seconds for all checks together
_PROCESSES = 8  # that share the device in the last check, at most
SHOWN = 30  # lines of output that the file has of a check
PACKAGES = ("torch", "numpy", "numba", "ortools", "networkx", "typer", "rich", "transformers", "diffusers", "pytest")
_OFFLINE = {"PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
_CUDA = "tests/runtime/test_cuda.py"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A command that exits with 0 if what it checks is right. `seconds` is its own limit."""

    name: str
    command: tuple[str, ...]
    seconds: float = 150.0
    environment: Mapping[str, str] = field(default_factory=dict)


def checks(python: str) -> tuple[Check, ...]:
    """Return the checks, the most doubtful first."""

    def tests(
        name: str, chosen: str, *paths: str, seconds: float = 120.0, more: Sequence[str] = (), **environment: str
    ) -> Check:
        options = ("-p", "no:cacheprovider", "-W", "default", "-m", "cuda", "-rs", "--tb=short")
        which = ("-k", chosen) if chosen else ()
        command = (python, "-m", "pytest", *options, *more, *which, *(paths or (_CUDA,)))
        return Check(name=name, command=command, seconds=seconds, environment=environment)

    return (
        tests("races, by torch's sanitizer", "torchs_sanitizer", seconds=150, MEMPLAN_TEST_SANITIZER="1"),
        tests("recordings", "cuda_graph or recordings or recorded or fused_attention or whole_steps"),
        tests("copies to the host", "a_budget_changes_no_bit"),
        tests("measured peak", "measured_peak", seconds=90),
        tests("replayed allocations", "on_cuda", "tests/runtime/test_replay.py", seconds=60),
        tests("all others", "", _CUDA, "tests/runtime", seconds=150, more=_several_at_once(python)),
    )


def _several_at_once(python: str) -> tuple[str, ...]:
    """Return pytest's options for tests in several processes, if `python` has the plugin (xdist)."""
    processes = min(_PROCESSES, os.cpu_count() or 1)
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('xdist') is None)"
    try:
        found = processes > 1 and subprocess.run((python, "-c", look), check=False).returncode == 0
    except OSError:  # each check says that there is no such program
        found = False
    return ("-n", str(processes), "--dist", "worksteal") if found else ()


def run(check: Check, seconds: float) -> dict[str, Any]:
    """Run a check for at most so many seconds, and return its outcome."""
    began = time.monotonic()
    made: dict[str, Any] = {"name": check.name, "command": " ".join(check.command)}
    try:
        done = subprocess.run(
            check.command,
            cwd=ROOT,
            env={**os.environ, **_OFFLINE, "PYTHONPATH": str(ROOT), **check.environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=max(seconds, 0.1),
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        output = error.stdout.decode(errors="replace") if isinstance(error.stdout, bytes) else error.stdout or ""
        made |= {"status": "timed out", "exit": None}
    else:
        output = done.stdout
        skipped = " skipped" in output and " passed" not in output
        status = "failed" if done.returncode else "skipped" if skipped else "passed"
        made |= {"status": status, "exit": done.returncode}
    made |= {"seconds": round(time.monotonic() - began, 1), "output": output.splitlines()[-SHOWN:]}
    return made


def run_all(chosen: Sequence[Check], output: Path, *, limit: float = LIMIT) -> list[dict[str, Any]]:
    """Run checks one after another within `limit` seconds, and write what is known after each to `output`."""
    ends = time.monotonic() + limit
    done: list[dict[str, Any]] = []
    for check in chosen:
        left = ends - time.monotonic()
        made = {"name": check.name, "status": "not run", "why": f"{limit:g} seconds were over"}
        done.append(run(check, min(left, check.seconds)) if left > 0 else made)
        waiting = [{"name": other.name, "status": "not run"} for other in chosen[len(done) :]]
        _write(output, [*done, *waiting])
    return done


def _write(output: Path, outcomes: Sequence[Mapping[str, Any]]) -> None:
    counts: dict[str, int] = {}
    for outcome in outcomes:
        counts[outcome["status"]] = counts.get(outcome["status"], 0) + 1
    made = {"counts": counts, "device": _device(), "versions": _versions(), "checks": list(outcomes)}
    partial = output.with_suffix(".tmp")
    partial.write_text(json.dumps(made, indent=1) + "\n")
    partial.replace(output)


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all checks, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--limit", type=float, default=LIMIT)
    parser.add_argument("--python", default=sys.executable)
    given = parser.parse_args(arguments)
    given.output.parent.mkdir(parents=True, exist_ok=True)
    outcomes = run_all(checks(given.python), given.output, limit=given.limit)
    for outcome in outcomes:
        print(f"{outcome['status']:>9}  {outcome.get('seconds', 0):6.1f} s  {outcome['name']}")
    return int(any(outcome["status"] != "passed" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
