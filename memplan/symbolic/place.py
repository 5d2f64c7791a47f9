"""Places buffers of any sizes whose live intervals are fixed. A call with a new shape waits for this, so it is fast.

Live intervals, and so which buffers overlap in time, do not depend on sizes. The buffers are placed in the order of
their offsets under the hint, each on top of all that overlap it in time (a segment tree over time, n log n). For the
hint itself no buffer ends higher than in the plan; for all other sizes the result is valid by construction. If the
arena is then above max live, the orders by area, size and lifetime are tried too, and the smallest arena is taken.
First-fit, which may put a buffer below others, takes a hundred times as long and is used on request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.core.problem import Interval
from memplan.errors import ShapeOutOfRange
from memplan.solvers.arrays import sections_of

Ints = npt.NDArray[np.int64]
_MOST = 1 << 52  # bytes: sums must stay exact in double precision


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A placement by `SymbolicPlacer`: offsets (-1 for a buffer of size 0), sizes, arena size and max live, bytes."""

    offsets: Ints
    sizes: Ints
    arena_size: int
    max_live: int


class SymbolicPlacer:
    """Places buffers whose live intervals and hint offsets are fixed, for any sizes. Buffers keep their given order."""

    def __init__(self, lives: Sequence[Interval], hint_offsets: Sequence[int], *, alignment: int, redzone: int) -> None:
        start = np.array([live.start for live in lives], np.int64)
        end = np.array([live.end for live in lives], np.int64)
        self.alignment, self.redzone = alignment, redzone
        self.n = len(lives)
        self._lo, self._hi, steps = sections_of(start, end)
        self._sections = int(steps.shape[0])
        self._order = np.lexsort((start, np.array(hint_offsets, np.int64)))
        self._life = end - start
        self._ones, self._zeros = np.ones(self.n, np.int64), np.zeros(self.n, np.int64)
        self._ptr = np.arange(self.n + 1)
        self._highest = np.full(self.n, 1 << 62, np.int64)

    def place(self, nbytes: Sequence[int], *, thorough: bool = False) -> Placed:
        """Place buffers of `nbytes` bytes each; with `thorough`, first-fit is tried too.

        Raises `ShapeOutOfRange` for a negative size, and for sums that are too large to be exact.
        """
        if min(nbytes, default=0) < 0:
            raise ShapeOutOfRange("would have a negative size", where="sizes", hint="narrow the range of the symbols")
        if max(nbytes, default=0) > _MOST or sum(nbytes) > _MOST:
            hint = "narrow the range of the symbols"
            raise ShapeOutOfRange(f"buffers of {sum(nbytes)} bytes in all", where="sizes", hint=hint)
        raw = np.fromiter(nbytes, np.int64, self.n)
        units = -(-raw // self.alignment)
        if self.redzone:
            units += np.where(units > 0, 2 * self.redzone // self.alignment, 0)
        max_live = self._max_live(units)
        best, least = self._zeros, -1
        for offsets in self._layouts(units, thorough):
            arena = int((offsets + units).max(initial=0))
            if least < 0 or arena < least:
                best, least = offsets, arena
            if least == max_live:
                break
        offsets = np.where(units > 0, best * self.alignment, -1)
        return Placed(
            offsets=offsets,
            sizes=units * self.alignment,
            arena_size=max(least, 0) * self.alignment,
            max_live=max_live * self.alignment,
        )

    def _max_live(self, units: Ints) -> int:
        change = np.bincount(self._lo, units, self._sections + 1) - np.bincount(self._hi, units, self._sections + 1)
        return int(np.cumsum(change).max(initial=0))

    def _layouts(self, units: Ints, thorough: bool) -> Iterator[Ints]:
        """Yield complete, valid placements (offsets in units of `alignment`), the fastest to compute first."""
        from memplan.solvers import fit_kernel, skyline_kernel

        times = (self._ptr, self._lo, self._hi, self._sections)
        present = self._order if units.all() else self._order[units[self._order] > 0]
        orders = [present]
        for key in (None, units * self._life, units, self._life):
            if key is not None:
                orders.append(present[np.argsort(-key[present], kind="stable")])
            offsets = np.full(self.n, -1, np.int64)
            rest = (units, self._ones, self._zeros, self._highest)
            skyline_kernel.on_skyline(orders[-1], *rest, *times, offsets)
            yield offsets
        for order in orders if thorough else ():
            offsets = np.full(self.n, -1, np.int64)
            fit_kernel.fit(order, units, self._ones, self._zeros, *times[:3], offsets)
            yield offsets
