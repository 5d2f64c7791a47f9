"""Decides which loops one generated kernel of the CPU runs, and notes what they may overwrite.

Inductor writes loops that have nothing to do with each other into one kernel, as long as no other kernel has to run
between them. All that they touch is then alive at once. The same holds for loops over several blocks of rows, which it
would also fuse where they read the same tensor.
"""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.codegen.cpp import CppScheduling

from memplan.devices.kinds import HOST
from memplan.trace.fused.overwriting import Overwriting
from memplan.trace.fused.row_parts import BLOCK


def followed(
    make: Any, device_type: str, overwriting: Overwriting, most: int | None = None, *, in_blocks: bool = False
) -> Any:
    """Return what makes the scheduling of a graph: as `make`, but `overwriting` follows the loops of its kernels.

    Each loop stays as it is, and so do its results. Where Inductor does not write C++, `make` is returned: a Triton
    kernel is one loop, whose launch configuration Inductor chooses by running it several times on the same tensors, so
    that its results may not lie over what it reads.

    Args:
        make: Inductor's own.
        device_type: The kind of the device.
        overwriting: Is told of each loop.
        most: The bytes that kernels of several loops touch at most; None: there is no limit.
        in_blocks: The graph was divided by rows: no kernel computes parts of two blocks.
    """
    if device_type != HOST or config.cpu_backend != "cpp":
        return make
    return lambda scheduler: _FollowedGroups(scheduler, overwriting, most, in_blocks=in_blocks)


class _FollowedGroups(CppScheduling):
    """Inductor's scheduling, which begins a new kernel where a loop would make the present one touch too much, or
    another block of rows.
    """

    def __init__(self, scheduler: Any, overwriting: Overwriting, most: int | None, *, in_blocks: bool) -> None:
        super().__init__(scheduler)  # type: ignore[no-untyped-call]
        self._overwriting, self._in_blocks = overwriting, in_blocks
        self._most, self._touched = most, 0
        self._blocks: set[int] = set()

    def codegen_node(self, node: Any) -> None:
        """Write the loop of one node, into a new kernel if need be."""
        nbytes = 0 if self._most is None else int(node.get_read_write_buffers_sizes())
        blocks = _blocks_of(node) if self._in_blocks else set()
        too_much = self._most is not None and self._touched and self._touched + nbytes > self._most
        if too_much or (self._blocks and blocks and blocks != self._blocks):
            self.flush()
        self._touched += nbytes
        self._blocks |= blocks
        self._overwriting.add(node.get_nodes())
        super().codegen_node(node)

    def can_fuse_horizontal(self, node1: Any, node2: Any) -> bool:
        """Return whether two loops may become one."""
        return not self._apart(node1, node2) and bool(super().can_fuse_horizontal(node1, node2))  # type: ignore[no-untyped-call]

    def can_fuse_vertical(self, node1: Any, node2: Any) -> bool:
        """Return whether a loop and one that reads its result may become one."""
        return not self._apart(node1, node2) and bool(super().can_fuse_vertical(node1, node2))  # type: ignore[no-untyped-call]

    def flush(self) -> None:
        """End the present kernel."""
        super().flush()  # type: ignore[no-untyped-call]
        self._overwriting.end()
        self._touched = 0
        self._blocks = set()

    def _apart(self, one: Any, other: Any) -> bool:
        """Return whether two loops compute different blocks of rows."""
        if not self._in_blocks:
            return False
        mine, theirs = _blocks_of(one), _blocks_of(other)
        return bool(mine and theirs and mine != theirs)


def _blocks_of(node: Any) -> set[int]:
    """Return the blocks of rows that a loop computes; none for a loop over whole tensors."""
    origins = (origin for one in node.get_nodes() for origin in getattr(one.node, "origins", ()))
    return {origin.meta[BLOCK] for origin in origins if BLOCK in origin.meta}
