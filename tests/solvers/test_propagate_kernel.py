"""Propagation: no placement is lost, what each rule raises, and how much all of them exclude on fixed problems."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from memplan.solvers.arrays.instance import Instance, instance_of
from memplan.solvers.arrays.problem_arrays import Ints, ProblemArrays, core_of
from memplan.solvers.search import propagate_kernel as kernel
from tests.solvers.small import alive_together, sections_of_buffer, small_problem


@dataclass(kw_only=True)
class _State:
    """A state of the tree search, as `propagate` takes it; all sections have changed."""

    piece: Instance
    capacity: int
    reach: Ints
    latest: Ints
    hole: Ints
    placed: np.ndarray
    room: int = 2_000
    consistent: bool = False
    tp: int = 0
    trail: Ints = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    weight: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    changed: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int8))

    def propagate(self, *, thorough: bool, ends: int = 3, rounds: int = 3, changed: int = kernel.ALL) -> _State:
        core, piece = self.piece.core, self.piece
        unplaced = np.array(
            [
                sum(int(core.size[b]) for b in range(core.n) if s in sections_of_buffer(core, b) and not self.placed[b])
                for s in range(core.sections)
            ],
            np.int64,
        )
        self.trail = np.full((self.room, 3), -9, np.int64)
        self.weight = np.zeros(core.sections, np.int64)
        self.changed = np.full(core.sections, changed, np.int8)
        self.consistent, self.tp = kernel.propagate(
            thorough, self.capacity, unplaced, self.hole, self.reach, self.latest, core.size, self.placed,
            piece.adj_ptr, piece.adj, piece.mem_ptr, piece.mem, core.lo, core.hi, self.weight, self.changed,
            self.trail, np.int64(0), np.empty(core.n + 1, np.int64), ends, rounds,
        )  # fmt: skip
        return self


def _state(capacity: int, *rows: tuple[int, int, int], room: int = 2_000, **given: dict[int, int]) -> _State:
    """Buffers (size, start, end) under a capacity; `given` changes `reach`, `latest` or `hole` of some."""
    n = len(rows)
    size, lo, hi = (np.array(column, np.int64) for column in zip(*rows, strict=True))
    core = ProblemArrays(
        unit=1, size=size, raw=size, align=np.ones(n, np.int64), low=np.zeros(n, np.int64),
        pinned=np.zeros(n, np.bool_), seg_ptr=np.arange(n + 1), seg_lo=lo, seg_hi=hi, lo=lo, hi=hi,
        steps=np.arange(int(hi.max())), start=lo, source=np.arange(n),
    )  # fmt: skip
    columns = {"reach": np.zeros(n, np.int64), "latest": capacity - size, "hole": np.full(n, -1, np.int64)}
    for name, values in given.items():
        for b, value in values.items():
            columns[name][b] = value
    piece = instance_of(core, capacity - size)
    return _State(
        piece=piece,
        capacity=capacity,
        placed=np.zeros(n, np.bool_),
        room=room,
        reach=columns["reach"],
        latest=columns["latest"],
        hole=columns["hole"],
    )


def _random_states() -> Iterator[tuple[int, _State]]:
    """States of the tree search on small problems: some buffers placed from below, some skipped."""
    for seed in range(240):
        chance = random.Random(seed)
        core = core_of(small_problem(seed, most=5, aligned=False))
        if core.unit > 1:
            continue
        load = max(
            sum(int(core.size[b]) for b in range(core.n) if s in sections_of_buffer(core, b))
            for s in range(core.sections)
        )
        capacity = load + chance.randint(0, 1)
        piece = instance_of(core, core.max_offset(capacity))
        allowed, hole = np.zeros(core.n, np.int64), np.full(core.n, -1, np.int64)
        placed = np.zeros(core.n, np.bool_)
        for b in chance.sample(range(core.n), min(core.n, chance.randint(0, 2))):
            if allowed[b] + core.size[b] > capacity:
                continue
            if chance.random() < 0.5:
                placed[b] = True
                for c in range(core.n):
                    if c != b and not placed[c] and alive_together(core, b, c):
                        allowed[c] = max(allowed[c], allowed[b] + core.size[b])
                        if allowed[c] != hole[c]:
                            hole[c] = -1
            else:
                hole[b] = allowed[b]
        if not placed.all() and (allowed <= piece.max_offset).all():
            yield (
                seed,
                _State(
                    piece=piece,
                    capacity=capacity,
                    reach=allowed,
                    latest=piece.max_offset.copy(),
                    hole=hole,
                    placed=placed,
                ),
            )


def _placements(state: _State) -> Iterator[dict[int, int]]:
    """All placements of the unplaced buffers in which every skipped one lies above a buffer that blocks its hole."""
    core = state.piece.core
    free = [b for b in range(core.n) if not state.placed[b]]
    size = core.size.tolist()
    met = {(b, c): alive_together(core, b, c) for b in free for c in free if b != c}

    def extend(found: dict[int, int]) -> Iterator[dict[int, int]]:
        if len(found) == len(free):
            if all(_is_blocked(b, found) for b in free if state.hole[b] >= 0):
                yield dict(found)
            return
        b = free[len(found)]
        for at in range(int(state.reach[b]), int(state.latest[b]) + 1):
            if all(not met[b, c] or at >= low + size[c] or low >= at + size[b] for c, low in found.items()):
                found[b] = at
                yield from extend(found)
                del found[b]

    def _is_blocked(b: int, found: dict[int, int]) -> bool:
        low = int(state.hole[b])
        return any(
            met[b, y] and at < low + size[b] and at + size[y] > low and found[b] >= at + size[y]
            for y, at in found.items()
            if y != b
        )

    yield from extend({})


def _extremes(state: _State) -> dict[int, tuple[int, int]] | None:
    """The lowest and highest offset of each unplaced buffer over the first placements; None if there are none."""
    found: dict[int, tuple[int, int]] | None = None
    for seen, placement in enumerate(_placements(state)):
        known = found or {b: (at, at) for b, at in placement.items()}
        found = {b: (min(at, known[b][0]), max(at, known[b][1])) for b, at in placement.items()}
        if seen > 500:
            break
    return found


@pytest.mark.parametrize(("thorough", "dead_ends", "open_offsets"), [(False, 18, 4911), (True, 18, 4661)])
def test_no_placement_is_lost_and_this_much_is_excluded(thorough: bool, dead_ends: int, open_offsets: int) -> None:
    """The figures are recorded: fewer open offsets are an improvement to record, more are weaker rules."""
    ended, still_open = 0, 0
    for seed, state in _random_states():
        before = (state.reach.copy(), state.latest.copy())
        extremes = _extremes(state)
        state.propagate(thorough=thorough)
        assert not state.changed.any()
        if not state.consistent:
            assert extremes is None, seed
            assert state.weight.any()
            ended += 1
        else:
            for b, (lowest, highest) in (extremes or {}).items():
                assert state.reach[b] <= lowest, (seed, b)
                assert state.latest[b] >= highest, (seed, b)
            still_open += int((state.latest - state.reach + 1)[~state.placed].sum())
        for kind, b, old in reversed(state.trail[: state.tp].tolist()):
            {kernel.REACH: state.reach, kernel.LATEST: state.latest}[kind][b] = old
        assert (state.reach.tolist(), state.latest.tolist()) == (before[0].tolist(), before[1].tolist()), seed
    assert (ended, still_open) == (dead_ends, open_offsets)


def test_some_buffer_must_be_low_enough() -> None:
    """Capacity 10, 8 units unplaced: one of them must begin at 2 or below."""
    rows = ((4, 0, 1), (4, 0, 1))
    assert _state(10, *rows, reach={0: 2, 1: 3}).propagate(thorough=False).consistent
    dead = _state(10, *rows, reach={0: 3, 1: 3}).propagate(thorough=False)
    assert (dead.consistent, dead.weight.tolist()) == (False, [1])
    assert _state(10, *rows, reach={0: 3, 1: 3}).propagate(thorough=False, changed=0).consistent


def test_the_only_buffer_that_can_be_lowest_is_and_the_others_lie_above_it() -> None:
    rows = ((4, 0, 1), (3, 0, 1))
    alone = _state(9, *rows, reach={1: 3}).propagate(thorough=True)
    assert (alone.reach.tolist(), alone.latest.tolist()) == ([0, 4], [2, 6])
    cheap = _state(9, *rows, reach={1: 3}).propagate(thorough=False)
    assert (cheap.reach.tolist(), cheap.latest.tolist()) == ([0, 3], [5, 6])
    both = _state(9, *rows, reach={1: 2}).propagate(thorough=True)
    assert (both.reach.tolist(), both.latest.tolist()) == ([0, 2], [5, 6])


def test_an_order_of_two_buffers_that_is_alone_possible_is_enforced() -> None:
    """The first buffer is the only one that can be lowest in section 0, so the one that meets it in section 1 moves."""
    above = _state(12, (6, 0, 2), (5, 0, 1), (4, 1, 2), reach={1: 2}).propagate(thorough=True)
    assert (above.consistent, above.reach.tolist(), above.latest.tolist()) == (True, [0, 6, 6], [1, 7, 8])
    dead = _state(12, (6, 0, 2), (5, 0, 1), (4, 1, 2), reach={1: 2}, latest={2: 5}).propagate(thorough=True)
    assert (dead.consistent, dead.weight.tolist()) == (False, [1, 0])
    just = _state(12, (6, 0, 2), (5, 0, 1), (4, 1, 2), reach={1: 2}, latest={2: 6}).propagate(thorough=True)
    assert just.consistent
    below = _state(12, (3, 0, 2), (4, 0, 1), (4, 1, 2), reach={1: 6}, latest={2: 2}).propagate(thorough=True)
    assert (below.consistent, below.reach.tolist(), below.latest.tolist()) == (True, [4, 7, 0], [5, 8, 1])


def test_no_buffer_begins_where_too_much_would_stay_unfilled() -> None:
    """Capacity 10 full of units: nothing may begin between 1 and 3, because only 3 units can end at 3 or below."""
    rows = ((3, 0, 1), (4, 0, 1), (3, 0, 1))
    state = _state(10, *rows, reach={1: 1, 2: 2}).propagate(thorough=True)
    assert state.consistent
    assert state.reach.tolist() == [0, 3, 3]
    assert state.latest.tolist()[0] == 0
    roomy = _state(11, *rows, reach={1: 2, 2: 2}).propagate(thorough=True)
    assert roomy.reach.tolist() == [0, 3, 3]
    dead = _state(10, *rows, reach={1: 1, 2: 2}, latest={2: 2}).propagate(thorough=True)
    assert (dead.consistent, dead.weight.tolist()) == (False, [1])


def test_a_skipped_buffer_lies_on_top_of_one_that_can_block_its_hole() -> None:
    rows = ((4, 0, 2), (3, 0, 1), (2, 1, 2))
    state = _state(20, *rows, hole={0: 0}).propagate(thorough=False)
    assert state.reach.tolist() == [2, 0, 0]
    assert state.trail[: state.tp].tolist() == [[kernel.REACH, 0, 0]]
    state = _state(20, *rows, hole={0: 0}, reach={2: 4}).propagate(thorough=False)
    assert state.reach.tolist() == [3, 0, 4]  # the third begins above the hole
    dead = _state(20, *rows, hole={0: 0}, reach={1: 4, 2: 4}).propagate(thorough=False)
    assert (dead.consistent, dead.weight.tolist()) == (False, [1, 1])
    tight = _state(20, *rows, hole={0: 0}, latest={0: 1}).propagate(thorough=False)
    assert not tight.consistent


def test_rounds_repeat_until_nothing_changes_within_the_limit() -> None:
    """The second buffer is raised after the first one, whose hole it can block only from there."""
    rows = ((4, 0, 1), (2, 0, 2), (2, 1, 2))
    for rounds, expected in ((0, [0, 0, 0]), (1, [2, 2, 0]), (2, [4, 2, 0]), (9, [4, 2, 0])):
        state = _state(20, *rows, hole={0: 0, 1: 0}).propagate(thorough=False, rounds=rounds)
        assert (state.consistent, state.reach.tolist()) == (True, expected)


def test_propagation_stops_where_the_trail_is_full() -> None:
    rows = ((3, 0, 1), (4, 0, 1), (3, 0, 1))
    for room in range(6):
        state = _state(10, *rows, room=room, reach={1: 1, 2: 2}).propagate(thorough=True)
        assert state.consistent
        assert state.tp <= room
