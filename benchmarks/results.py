"""Results of a benchmark: one JSON file for machines, one markdown table for people, both name the machine."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
_CPUINFO = Path("/proc/cpuinfo")

Cell = str | int | float | bool | None
Row = Mapping[str, Cell]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of one benchmark run. `columns` maps each row's keys to headings, which name the unit."""

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Row]
    settings: Mapping[str, Cell] = field(default_factory=dict)
    notes: Sequence[str] = ()


def machine() -> dict[str, Cell]:
    """What the numbers depend on: CPU, cores that this process may use, and versions. Imports no torch."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "numpy", "memplan")},
    }


def write(table: Table, directory: Path = RESULTS) -> Path:
    """Write `name.json` and `name.md` into `directory`; returns the path of the markdown."""
    directory.mkdir(parents=True, exist_ok=True)
    document = {
        "name": table.name,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "settings": dict(table.settings),
        "columns": dict(table.columns),
        "rows": [dict(row) for row in table.rows],
    }
    (directory / f"{table.name}.json").write_text(json.dumps(document, indent=2) + "\n")
    path = directory / f"{table.name}.md"
    path.write_text(to_markdown(table) + "\n")
    return path


def collect(batches: Iterable[Sequence[Row]], table_of: Callable[[Sequence[Row]], Table], directory: Path) -> int:
    """Write the table of all rows so far after each batch (the machine's time may be short), and print it at the end;
    the exit status."""
    rows: list[Row] = []
    for batch in batches:
        rows += batch
        write(table_of(rows), directory)
    print(to_markdown(table_of(rows)))
    return 0


def to_markdown(table: Table) -> str:
    """Title, machine, settings, table and notes, in this order."""
    headings = list(table.columns.values())
    lines = [
        f"# {table.title}",
        "",
        " · ".join(f"{key} {value}" for key, value in machine().items()),
        *(["", " · ".join(f"{key} {value}" for key, value in table.settings.items())] if table.settings else []),
        "",
        _line(headings),
        _line(["---", *["---:"] * (len(headings) - 1)]),
        *(_line([_cell(row.get(key)) for key in table.columns]) for row in table.rows),
        *(["", *table.notes] if table.notes else []),
    ]
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return str(value)


def _cpu_model() -> str:
    if _CPUINFO.exists():
        for line in _CPUINFO.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
