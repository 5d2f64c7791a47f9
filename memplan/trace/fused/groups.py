"""Bounds what one generated kernel of the CPU touches.

Inductor writes loops that have nothing to do with each other into one kernel, as long as no other kernel has to run
between them. All that they touch is then alive at once.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppScheduling


def bounded(make: Any, most: int | None) -> Any:
    """Return what makes the scheduling of a graph: `make`, or one whose kernels of several loops touch few bytes.

    `most`: the bytes that they touch at most; None: there is no limit. Each loop stays as it is, and so do its results.
    """
    if most is None or config.cpu_backend != "cpp":
        return make
    return lambda scheduler: _BoundedGroups(scheduler, most)


class _BoundedGroups(CppScheduling):
    """Inductor's scheduling, which begins a new kernel where a loop would make the present one touch too much."""

    def __init__(self, scheduler: Any, most: int) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self._most, self._touched = most, 0

    def codegen_node(self, node: Any) -> None:
        """Write the loop of one node, into a new kernel if need be."""
        nbytes = int(node.get_read_write_buffers_sizes())
        if self._touched and self._touched + nbytes > self._most:
            self.flush()
        self._touched += nbytes
        super().codegen_node(node)

    def flush(self) -> None:
        """End the present kernel."""
        super().flush()  # type: ignore[no-untyped-call]
        self._touched = 0
