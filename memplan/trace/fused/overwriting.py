"""Finds the results of generated kernels that may lie over what the kernel reads.

Inductor lets a kernel write over a buffer that has its last use there, and over what the forward has saved where
AOTAutograd donates it to the backward. memplan lets it do the former. The latter is a choice of the plan: what is saved
may have to be computed again later, or be read once more. So Inductor generates such kernels with a result of its own,
and the pairs that are found here become in-place candidates.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V


class Overwriting:
    """Follows the loops that are written into one kernel after another.

    `found` are the buffers, by the name of a result, whose bytes it may take: the loop that writes the result reads
    such a buffer at the index that it writes, and no later loop of the kernel reads it. Of loops that were fused into
    one, those that read it do so at the same index.
    """

    def __init__(self, found: dict[str, tuple[str, ...]]) -> None:
        self._found = found
        self._pairs: dict[tuple[str, str], None] = {}  # of the present kernel: (result, buffer)

    def add(self, loops: Sequence[Any]) -> None:
        """Follow loops that were fused into one, in their order."""
        seen: dict[str, set[Any]] = {}
        for loop in loops:
            for dep in loop.read_writes.reads_and_writes():
                seen.setdefault(dep.name, set()).add(dep)
            read = {dep.name for dep in loop.read_writes.reads}
            self._pairs = {pair: None for pair in self._pairs if pair[1] not in read}
            for result, dep in _same_index(loop):
                if len(seen[dep.name]) == 1:
                    self._pairs[result, dep.name] = None

    def end(self) -> None:
        """End the present kernel."""
        for result, buffer in self._pairs:
            self._found[result] = (*self._found.get(result, ()), buffer)
        self._pairs = {}


def _same_index(loop: Any) -> Iterator[tuple[str, MemoryDep]]:
    """Yield the result of a loop, and a read, for each that is at the index of the loop's only write."""
    if loop.is_template() or len(loop.read_writes.writes) != 1:
        return
    (write,) = loop.read_writes.writes
    (result, *others) = loop.get_outputs()
    fixed = V.graph.never_reuse_buffers
    if others or not isinstance(write, MemoryDep) or write.mode is not None or write.name != result.get_name():
        return
    if result.get_aliases() or result.get_mutations() or write.name in fixed:
        return
    for read in loop.read_writes.reads:
        if not isinstance(read, MemoryDep) or read.name in fixed or read.name in V.graph.scheduler.mutation_real_name:
            continue
        if (read.index, read.size) == (write.index, write.size):
            yield write.name, read
