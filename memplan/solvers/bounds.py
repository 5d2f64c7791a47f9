"""Lower bounds of the arena size.

There are two besides max live. With alignment, buffers that are alive together are at aligned offsets, so all but the
topmost of them take their rounded-up size. And no arena ends below a pinned buffer. The search raises the bound further
when it exhausts a capacity.
"""

from __future__ import annotations

import numpy as np

from memplan.solvers import thresholds
from memplan.solvers.arrays.problem_arrays import ProblemArrays, load_of


def lower_bound(arrays: ProblemArrays) -> int:
    """A proven lower bound of the arena size, bytes; at least max live. n log n."""
    if not arrays.n:
        return 0
    load = load_of(arrays) * arrays.unit
    padding = arrays.size * arrays.unit - arrays.raw
    bound = int(load.max())
    if padding.any():
        bound = int((load - _largest(arrays, padding)).max())
    pins = (arrays.low * arrays.unit + arrays.raw)[arrays.pinned]
    return max(bound, int(pins.max(initial=0)), int(arrays.raw.max()))


def _largest(
    arrays: ProblemArrays, value: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The largest `value` among the buffers of each section: written in ascending order, the last one remains."""
    segment_of = np.repeat(np.arange(arrays.n), np.diff(arrays.seg_ptr))
    top = np.zeros(arrays.sections, np.int64)
    if arrays.n > thresholds.PAINTED:  # writing could take n x sections; the largest of all is weaker, but valid
        top[:] = value.max()
        return top
    for k in np.argsort(value[segment_of], kind="stable"):
        top[arrays.seg_lo[k] : arrays.seg_hi[k]] = value[segment_of[k]]
    return top
