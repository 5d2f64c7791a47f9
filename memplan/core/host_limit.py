"""The memory of this machine that a process may have."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def host_memory(root: Path = _ROOT) -> int | None:
    """Return the bytes of memory that this process may have, of this machine or by a limit of its control groups.

    None where the system does not say. `root`: the folder that holds `proc` and `sys`.
    """
    found = [*_limits(root)]
    with suppress(ValueError, OSError, AttributeError):
        found.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return min(found, default=None)


def _limits(root: Path) -> Iterator[int]:
    """Yield the limits of the control groups of this process (of both versions of Linux), and of those around them."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for _, controllers, group in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        folder = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        own = PurePosixPath(group)
        for part in (own, *own.parents):
            with suppress(ValueError, OSError):  # "max", or a group that a container does not show
                yield int((folder / str(part).lstrip("/") / name).read_text())
