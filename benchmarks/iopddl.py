"""Reads the graphs of the IOPDDL contest (google/iopddl: ASPLOS and EuroSys 2025) as offset-assignment problems.

Each node has a lifetime and, for each strategy, a usage in bytes. As idealloc's reader does (its
`sanity/src/bin/iopddl_read.rs`), a node becomes a buffer of its largest or smallest usage and one byte more, alive from
the first to the last step of its interval, both included; the contest excludes the last step, and so would lose the
nodes that live for none. idealloc then renumbers the steps so that its peers need not free before they allocate, by an
amount that it takes at a buffer's birth for its death too: that changes which buffers are alive together, and is left
out here. The CSV files that idealloc ships differ again (its `G_1` has 99,505 pairs of buffers that are alive together,
graph G 39,389): they are instances of their own.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from memplan.core.problem import Buffer, Interval, Problem

USAGES = {"biggest": max, "smallest": min}


def read(path: Path, *, usage: str = "biggest") -> Problem:
    """The problem of one graph, a `.json` file or a `.json.gz` one. `usage` is a key of `USAGES`."""
    content = path.read_bytes()
    text = gzip.decompress(content) if path.suffix == ".gz" else content
    return of_nodes(json.loads(text)["problem"]["nodes"], usage=usage)


def of_nodes(nodes: dict[str, Any], *, usage: str = "biggest") -> Problem:
    """The problem of `nodes`, an object with the lists `intervals` and `usages`."""
    chosen = USAGES[usage]
    return Problem(
        buffers=tuple(
            Buffer(id=str(i), size=chosen(usages) + 1, live=Interval(first, last + 1))
            for i, ((first, last), usages) in enumerate(zip(nodes["intervals"], nodes["usages"], strict=True))
        )
    )


def graphs(folder: Path) -> Iterator[tuple[str, Path]]:
    """The graphs of a folder, by name: `asplos-2025-iopddl-A.json.gz` is `A`."""
    for path in sorted([*folder.glob("*.json"), *folder.glob("*.json.gz")]):
        yield path.name.partition(".")[0].rpartition("-")[2], path
