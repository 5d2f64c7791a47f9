"""Results of a benchmark: one JSON file for machines, one markdown table for people, both name the machine.

And what benchmarks share: their options, and rows that are kept in a file, so that a run that was ended goes on.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


# -- options, and rows that are kept while they are made --------------------------------------------------


def parser_of(
    name: str, description: str, models: Sequence[str], default: Sequence[str] | None = None
) -> argparse.ArgumentParser:
    """A parser that asks which of `models` to measure (`default`: all), and where the results go."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.{name}", description=description)
    chosen = list(models if default is None else default)
    parser.add_argument("--models", type=names(models), default=chosen, help="comma-separated, or all")
    parser.add_argument("--output", default=name.replace("_", "-"), help="name of the result files")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="folder of the result files")
    return parser


def names(known: Sequence[str]) -> Callable[[str], list[str]]:
    """A parser of comma-separated names out of `known`, or all of them."""

    def parse(text: str) -> list[str]:
        chosen = list(known) if text == "all" else text.split(",")
        if unknown := [name for name in chosen if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: not one of {', '.join(known)}, all")
        return chosen

    return parse


class ResumableLines:
    """The lines of a file of results. Without a file, nothing is kept.

    Raises `SystemExit` for a file that was made by other sources: `fingerprint` says which these are.
    """

    def __init__(self, file: Path | None, fingerprint: Callable[[], str]) -> None:
        self.known: list[str] = []
        self._file = file
        if file is None:
            return
        head = json.dumps({"sources": fingerprint()})
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        if not lines:
            file.write_text(head + "\n", encoding="utf-8")
        elif lines[0] != head:
            raise SystemExit(f"{file}: made by other sources or another torch; delete it, or name another file")
        self.known = lines[1:]

    def add(self, line: str) -> None:
        """Append a line to the file, if there is one."""
        if self._file is not None:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")


def kept_rows(
    models: Iterable[str], file: Path | None, settings: Callable[[], str], measure: Callable[[str], Sequence[Row]]
) -> Iterator[Sequence[Row]]:
    """Yield the rows of each model; those that a run before has kept in the file are not measured again."""
    lines = ResumableLines(file, settings)
    known = dict(map(json.loads, lines.known))
    for model in models:
        if model not in known:
            known[model] = measure(model)
            lines.add(json.dumps([model, known[model]]))
        yield known[model]


def fingerprint_of(root: Path, files: Iterable[Path]) -> str:
    """Return a checksum of source files, by their paths in `root`, and of torch's version."""
    import torch

    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]
