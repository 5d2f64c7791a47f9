"""A piece prepared for the search, with the pairs of buffers alive together, and the outcomes of a search."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays


class PieceOutcome(enum.Enum):
    """The outcome of a search for a placement of a piece under a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A piece: its buffers, and the highest offset of each in units.

    `adj_ptr` and `adj` list the buffers that are alive together with each buffer, `mem_ptr` and `mem` the buffers that
    are alive in each section.
    """

    arrays: ProblemArrays
    max_offset: Ints
    adj_ptr: Ints
    adj: npt.NDArray[np.int32]
    mem_ptr: Ints
    mem: npt.NDArray[np.int32]


def instance_of(arrays: ProblemArrays, max_offset: Ints) -> Instance:
    """Prepare `arrays` for the search. Time and memory are proportional to the pairs of buffers alive together."""
    from memplan.solvers.arrays import fit_kernel

    by_start = np.argsort(arrays.lo, kind="stable")
    segments = (arrays.seg_ptr, arrays.seg_lo, arrays.seg_hi)
    adj_ptr, adj = fit_kernel.neighbours(arrays.n, *segments, arrays.lo, arrays.hi, by_start)
    mem_ptr, mem = fit_kernel.members(arrays.sections, *segments)
    return Instance(arrays=arrays, max_offset=max_offset, adj_ptr=adj_ptr, adj=adj, mem_ptr=mem_ptr, mem=mem)
