"""Ejection search on one piece: a buffer that does not fit ejects those that are cheapest to eject.

The placed buffers are always a valid placement; the others are in a list of unplaced buffers. An unplaced buffer goes
to the offset at which the overlapping buffers have the smallest total penalty; these are ejected and become unplaced.
The penalty of a buffer that ejected others rises, so that buffers that are hard to place stay and easy ones move. Then
some neighbours move to other free offsets, which merges small holes. The method is that of Nagata and Braysy, "A
powerful route minimization heuristic for the vehicle routing problem with time windows" (2009), with offsets in place
of routes. It proves nothing. It finds arenas a little above max live, where many placements exist, much faster than the
tree search does.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from memplan.solvers.arrays.instance import Instance
from memplan.solvers.arrays.problem_arrays import Ints
from memplan.solvers.limits import WorkBudget

_MOVES = 4  # moves of neighbours after each ejection
_BASE, _POWER = 1_000, 0.5  # a buffer's first penalty: its area to this power; the mean one's is _BASE
TURN_NODES = 1  # nodes of the tree search that take as long as one insertion


@dataclass(slots=True)
class Learnt:
    """The start of the next ejection search on the same buffers, under another capacity: offsets and penalties."""

    offsets: Ints  # units; -1: unplaced
    penalty: Ints | None = None


class Ejection:
    """A partial placement of `piece`, which `run` extends."""

    def __init__(self, piece: Instance, seed: int, learnt: Learnt | None = None) -> None:
        arrays = piece.arrays
        learnt = learnt or Learnt(np.full(arrays.n, -1, np.int64))
        fits = (learnt.offsets >= arrays.low) & (learnt.offsets <= piece.max_offset)
        learnt.offsets = np.where(fits, learnt.offsets, -1)
        self.piece, self.offsets = piece, learnt.offsets
        lengths = np.add.reduceat(arrays.seg_hi - arrays.seg_lo, arrays.seg_ptr[:-1])
        area = (arrays.size * lengths).astype(np.float64)
        self._weight = np.maximum(1, _BASE * (area / area.mean()) ** _POWER).astype(np.int64)
        if learnt.penalty is None:
            learnt.penalty = self._weight.copy()
        self._penalty = learnt.penalty
        self._state = np.array([seed], np.int64)

    def run(self, turns: int, budget: WorkBudget) -> bool:
        """Continue for `turns` insertions; returns whether all buffers are placed (`offsets`, units)."""
        from memplan.solvers.search import eject_kernel

        arrays, piece = self.piece.arrays, self.piece
        taken, left = eject_kernel.eject(
            arrays.size, arrays.align, arrays.low, piece.max_offset, piece.adj_ptr, piece.adj, self._weight,
            budget.nodes(turns * TURN_NODES, arrays.n) // TURN_NODES + 1, _MOVES, self._penalty, self.offsets,
            self._state,
        )  # fmt: skip
        budget.spend(taken * TURN_NODES, arrays.n)
        return bool(left == 0)
