"""A problem as arrays, the input of every compiled solver. Step 0 of the portfolio: normalize.

Three reductions are exact. Buffers of size 0 are left out. Sizes, rounded up to the alignment that all offsets share,
are counted in *units*, their greatest common divisor. Steps become *sections*, one for each maximal set of buffers
alive together: a new section begins at a death that follows a birth.

Of lower bounds of the arena there are two besides max live. With alignment, buffers that are alive together are at
aligned offsets, so all but the topmost of them take their rounded-up size. And no arena ends below a pinned buffer. The
search raises the bound further when it exhausts a capacity.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import numpy.typing as npt

from memplan.core.problem import Buffer, Problem

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProblemArrays:
    """Buffers 0..n-1 of a problem (those with a size above 0, in definition order), in units and sections.

    Buffer b is alive in the sections [seg_lo[k], seg_hi[k]) for k in seg_ptr[b]..seg_ptr[b+1]-1; [lo, hi) is their
    hull. Its offset is a multiple of `align[b]` and at least `low[b]`, both in units; if pinned, it is `low[b]`.
    """

    unit: int  # bytes
    size: Ints  # units, rounded up
    raw: Ints  # bytes, as given
    align: Ints  # units
    low: Ints  # units
    pinned: Bools
    seg_ptr: Ints
    seg_lo: Ints
    seg_hi: Ints
    lo: Ints
    hi: Ints
    steps: Ints  # a step of each section at which all of its buffers are alive
    start: Ints  # the first step of each buffer
    source: Ints  # the index of each buffer in Problem.buffers

    @property
    def n(self) -> int:
        """The number of buffers."""
        return int(self.size.shape[0])

    @property
    def sections(self) -> int:
        """The number of sections."""
        return int(self.steps.shape[0])

    @property
    def content(self) -> bytes:
        """Everything that a placement depends on, as bytes: equal for repeated layers, at any time."""
        columns = (self.size, self.raw, self.align, self.low, self.pinned, self.seg_ptr, self.seg_lo, self.seg_hi)
        return b"".join(column.tobytes() for column in columns)

    def max_offset(self, capacity: int) -> Ints:
        """The highest offset (units) at which each buffer ends within `capacity` bytes; negative if there is none."""
        highest = (capacity - self.raw) // self.unit
        highest = highest // self.align * self.align
        return np.where(self.pinned, np.where(highest >= self.low, self.low, -1), highest)

    def ceiling(self, capacity: int) -> int:
        """The highest rounded-up end, in units, that any buffer may have within `capacity` bytes."""
        return int((self.max_offset(capacity) + self.size).max(initial=0))


def make_problem_arrays(problem: Problem) -> ProblemArrays:
    """The arrays of `problem`. n log n."""
    raw = _column(problem.buffers, "size")
    source = np.flatnonzero(raw)
    buffers = problem.buffers if len(source) == len(raw) else tuple(problem.buffers[i] for i in source)
    raw, align = raw[source], _column(buffers, "alignment")
    pins = [b.pinned_offset for b in buffers]
    pinned, low = np.zeros(len(pins), np.bool_), np.zeros(len(pins), np.int64)
    if pins.count(None) < len(pins):
        pinned = np.array([pin is not None for pin in pins], np.bool_)
        low = np.array([pin or 0 for pin in pins], np.int64)
    unit, size, align = _units(raw, align, low)
    seg_ptr, start, end = _segments(buffers)
    seg_lo, seg_hi, steps = sections_of(start, end)
    return ProblemArrays(
        unit=unit, size=size, raw=raw, align=align, low=low // unit, pinned=pinned, seg_ptr=seg_ptr, seg_lo=seg_lo,
        seg_hi=seg_hi, lo=seg_lo[seg_ptr[:-1]], hi=seg_hi[seg_ptr[1:] - 1], steps=steps, start=start[seg_ptr[:-1]],
        source=source,
    )  # fmt: skip


def subset(arrays: ProblemArrays, ids: Ints, base: int = 0) -> ProblemArrays:
    """The arrays of the buffers `ids` alone, in sections of their own, at `base` units or above; `source` is `ids`."""
    counts = np.diff(arrays.seg_ptr)[ids]
    seg_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    segments = np.repeat(arrays.seg_ptr[ids] - seg_ptr[:-1], counts) + np.arange(seg_ptr[-1])
    seg_lo, seg_hi, steps = sections_of(arrays.seg_lo[segments], arrays.seg_hi[segments])
    align = arrays.align[ids]
    return ProblemArrays(
        unit=arrays.unit, size=arrays.size[ids], raw=arrays.raw[ids], align=align,
        low=np.maximum(arrays.low[ids], -(-base // align) * align), pinned=arrays.pinned[ids], seg_ptr=seg_ptr,
        seg_lo=seg_lo, seg_hi=seg_hi, lo=seg_lo[seg_ptr[:-1]], hi=seg_hi[seg_ptr[1:] - 1], steps=arrays.steps[steps],
        start=arrays.start[ids], source=ids,
    )  # fmt: skip


def _column(rows: Sequence[object], name: str) -> Ints:
    return np.fromiter(map(attrgetter(name), rows), np.int64, len(rows))


def _units(raw: Ints, align: Ints, low: Ints) -> tuple[int, Ints, Ints]:
    """The unit in bytes, and the sizes and alignments in units. Offsets are sums of sizes, pins and alignments."""
    if not raw.shape[0]:
        return 1, raw, align
    shared = int(np.gcd.reduce(align))
    size = -(-raw // shared) * shared
    unit = int(np.gcd(np.gcd.reduce(size), np.gcd.reduce(low)))
    for alignment in np.unique(align):
        if unit % alignment:
            unit = int(np.gcd(unit, alignment))
    return unit, size // unit, np.where(unit % align == 0, 1, align // unit)


def _segments(buffers: tuple[Buffer, ...]) -> tuple[Ints, Ints, Ints]:
    """Return the pointers of all buffers to their segments, and the segments' first and last (exclusive) steps."""
    n = len(buffers)
    if not any(b.gaps for b in buffers):
        return np.arange(n + 1), _column(buffers, "live.start"), _column(buffers, "live.end")
    ptr = np.zeros(n + 1, np.int64)
    ptr[1:] = np.cumsum([len(b.gaps) + 1 for b in buffers])
    segments = [segment for b in buffers for segment in b.segments]
    return ptr, _column(segments, "start"), _column(segments, "end")


def sections_of(start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """The section of every start and end, and for each section a step at which all of its buffers are alive."""
    if not start.shape[0]:
        return start, end, start
    steps, place = np.unique(np.concatenate((start, end)), return_inverse=True)
    born, died = np.split(place, 2)
    births = np.cumsum(np.bincount(born, minlength=steps.shape[0]))
    deaths = np.flatnonzero(np.bincount(died, minlength=steps.shape[0]))
    births_before = np.where(deaths > 0, births[deaths - 1], 0)
    opens = np.diff(births_before, prepend=0) > 0
    section = np.zeros(steps.shape[0], np.int64)
    section[deaths[opens]] = 1
    section = np.cumsum(section)
    count = int(section[-1])
    # A section is represented by the last birth in it: then all of its buffers are alive.
    last_birth = np.zeros(count, np.int64)
    last_birth[section[born]] = 0
    np.maximum.at(last_birth, section[born], born)
    return section[born], section[died], steps[last_birth]


def load_of(arrays: ProblemArrays) -> Ints:
    """The live units (rounded-up sizes) of each section."""
    change = np.zeros(arrays.sections + 1, np.int64)
    sizes = np.repeat(arrays.size, np.diff(arrays.seg_ptr))
    np.add.at(change, arrays.seg_lo, sizes)
    np.subtract.at(change, arrays.seg_hi, sizes)
    return np.cumsum(change)[:-1]


class PieceOutcome(enum.Enum):
    """The outcome of a search for a placement of a piece under a capacity."""

    SOLVED = enum.auto()
    EXHAUSTED = enum.auto()  # no placement exists
    LIMIT = enum.auto()
    LARGE = enum.auto()  # not searched, and the heuristics found none


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


def meets(arrays: ProblemArrays, b: int) -> Bools:
    """Return which buffers are alive in a section in which `b` is alive, itself included."""
    alive = np.zeros(arrays.seg_lo.shape[0], np.bool_)
    for k in range(arrays.seg_ptr[b], arrays.seg_ptr[b + 1]):
        alive |= (arrays.seg_lo < arrays.seg_hi[k]) & (arrays.seg_hi > arrays.seg_lo[k])
    return np.asarray(np.logical_or.reduceat(alive, arrays.seg_ptr[:-1]))


def instance_of(arrays: ProblemArrays, max_offset: Ints) -> Instance:
    """Prepare `arrays` for the search. Time is quadratic in the buffers, memory in those alive together."""
    adj = [np.flatnonzero(meets(arrays, b)).astype(np.int32) for b in range(arrays.n)]
    adj = [near[near != b] for b, near in enumerate(adj)]
    lengths = arrays.seg_hi - arrays.seg_lo
    first = np.repeat(arrays.seg_lo - (np.cumsum(lengths) - lengths), lengths)
    section = first + np.arange(len(first))  # of each buffer, in order, each section in which it is alive
    owner = np.repeat(np.repeat(np.arange(arrays.n, dtype=np.int32), np.diff(arrays.seg_ptr)), lengths)
    return Instance(
        arrays=arrays,
        max_offset=max_offset,
        adj_ptr=np.cumsum([0, *map(len, adj)]),
        adj=np.concatenate(adj),
        mem_ptr=np.cumsum([0, *np.bincount(section, minlength=arrays.sections)]),
        mem=owner[np.argsort(section, kind="stable")],
    )


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


def _largest(arrays: ProblemArrays, value: Ints) -> Ints:
    """The largest `value` among the buffers of each section: written in ascending order, the last one remains."""
    segment_of = np.repeat(np.arange(arrays.n), np.diff(arrays.seg_ptr))
    top = np.zeros(arrays.sections, np.int64)
    for k in np.argsort(value[segment_of], kind="stable"):
        top[arrays.seg_lo[k] : arrays.seg_hi[k]] = value[segment_of[k]]
    return top
