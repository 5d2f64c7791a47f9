"""Joins: which are drawn, and what a joined piece is made of."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from benchmarks.instances import planted
from memplan.core.problem import Buffer, Interval, Problem
from memplan.solvers import join_kernel as kernel
from memplan.solvers.arrays import Instance, instance_of, load_of, make_problem_arrays
from memplan.solvers.tree_search import joined
from tests.solvers.small import sections_of_buffer, small_problem


def _listed(*rows: tuple[int, int, int], capacity: int | None = None, spare: dict[int, int] | None = None) -> Instance:
    """Buffers (size, start, end) under a capacity, max live if None; `spare` lowers the highest offset of some."""
    made = tuple(Buffer(id=str(i), size=size, live=Interval(a, b)) for i, (size, a, b) in enumerate(rows))
    problem = Problem(buffers=made)
    arrays = make_problem_arrays(problem)
    assert arrays.unit == 1
    highest = arrays.max_offset(capacity or problem.max_live)
    for b, less in (spare or {}).items():
        highest[b] -= less
    return instance_of(arrays, highest)


def _groups(piece: Instance, *, chance: float = 0.0, seed: int = 0) -> list[set[int]]:
    """The sets of buffers that are joined."""
    group = joined(piece, chance=chance, seed=seed).group
    return [set(np.flatnonzero(group == g).tolist()) for g in np.unique(group) if (group == g).sum() > 1]


def _joined_rows(rows: list[tuple[int, int, int]], **given: Any) -> list[list[int]]:
    """The places in `rows` that are joined, which do not depend on the order in which buffers are defined."""
    found = []
    for turn in range(2 * len(rows)):
        order = [(k + turn) % len(rows) for k in range(len(rows))][:: 1 if turn < len(rows) else -1]
        spare = {order.index(b): less for b, less in given.get("spare", {}).items()}
        piece = _listed(*(rows[b] for b in order), capacity=given.get("capacity"), spare=spare)
        groups = _groups(piece, chance=given.get("chance", 0.0))
        found.append(sorted(sorted(order[k] for k in group) for group in groups))
    assert all(groups == found[0] for groups in found), found
    return found[0]


def test_removal_from_a_list() -> None:
    for gone, expected in ((0, [1, 2]), (1, [0, 2]), (2, [0, 1])):
        first, following = np.array([-1, 0]), np.array([1, 2, -1])
        kernel._remove(first, following, 1, gone)
        left, at = [], int(first[1])
        while at >= 0:
            left.append(at)
            at = int(following[at])
        assert left == expected


def test_likely_joins_take_the_only_partner_of_a_size() -> None:
    rows = [(3, 0, 1), (2, 0, 1), (7, 0, 1), (3, 1, 3), (2, 1, 2), (5, 1, 3), (9, 0, 3), (1, 2, 3)]
    assert _joined_rows(rows, capacity=40) == []
    found = _joined_rows(rows, capacity=40, chance=1.0)
    assert [0, 3] in found
    assert [1, 4] in found
    two_end = [(3, 0, 1), (3, 0, 1), (3, 1, 2), (10, 0, 2)]
    assert all(2 not in group for group in _joined_rows(two_end, capacity=30, chance=1.0))
    two_begin = [(3, 0, 1), (3, 1, 2), (3, 1, 3), (10, 0, 3), (4, 2, 3)]
    assert _joined_rows(two_begin, capacity=30, chance=1.0) == []


def test_joined_buffers_keep_the_lower_limit() -> None:
    rows = [(3, 0, 1), (3, 1, 2), (10, 0, 2)]
    for b, less in ((0, 5), (1, 4)):
        assert _joined_rows(rows, capacity=20, chance=1.0, spare={b: less}) == [[0, 1]]
        found = joined(_listed(*rows, capacity=20, spare={b: less}), chance=1.0)
        assert found.piece.max_offset[found.group[0]] == 20 - 3 - less
        assert found.piece.max_offset[found.group[2]] == 20 - 10


def test_side_by_side_needs_equal_limits() -> None:
    rows = [(3, 0, 1), (2, 0, 1), (4, 1, 2), (9, 0, 2)]
    assert _joined_rows(rows, capacity=20, chance=1.0) == [[0, 1]]
    for b in (0, 1):
        assert _joined_rows(rows, capacity=20, chance=1.0, spare={b: 1}) == []
    assert _joined_rows(rows, capacity=20, chance=1.0, spare={0: 1, 1: 1}) == [[0, 1]]
    assert _joined_rows([(4, 0, 1), (3, 1, 2), (2, 1, 2), (9, 0, 2)], capacity=20, chance=1.0) == [[1, 2]]


def test_buffers_with_pins_gaps_or_alignments_are_never_joined() -> None:
    def groups(**change: Any) -> list[set[int]]:
        made = [Buffer(id="a", size=3, live=Interval(0, 1)), Buffer(id="b", size=3, live=Interval(1, 2))]
        made.append(Buffer(id="c", size=4, live=Interval(0, 2)))
        made[1] = replace(made[1], **change)
        arrays = make_problem_arrays(Problem(buffers=tuple(made)))
        return _groups(instance_of(arrays, arrays.max_offset(7)), chance=1.0)

    assert groups() == [{0, 1}]
    assert groups(pinned_offset=0) == []
    assert groups(alignment=2) == []
    assert groups(live=Interval(1, 4), gaps=(Interval(2, 3),)) == []


@pytest.mark.parametrize("chance", [0.5, 1.0])
def test_a_joined_piece_covers_the_same_sections_with_the_same_units(chance: float) -> None:
    fewer = 0
    for seed in range(60):
        problem = planted(12, seed=seed, height=24, steps=10) if seed % 2 else small_problem(seed, most=14)
        arrays = make_problem_arrays(problem)
        piece = instance_of(arrays, arrays.max_offset(problem.max_live + seed % 3))
        if (piece.max_offset < 0).any():
            continue
        found = joined(piece, chance=chance, seed=seed)
        smaller = found.piece.arrays
        fewer += smaller.n < arrays.n
        assert load_of(smaller).max() == load_of(arrays).max()
        covered: dict[int, list[tuple[int, int]]] = {}
        for b in range(arrays.n):
            inside = covered.setdefault(int(found.group[b]), [])
            inside.append((b, int(found.above[b])))
        for g, members in covered.items():
            spans = sorted((low, low + int(arrays.size[b]), b) for b, low in members)
            area = sum(int(arrays.size[b]) * len(sections_of_buffer(arrays, b)) for b, _ in members)
            assert spans[0][0] == 0
            assert max(top for _, top, _ in spans) == smaller.size[g]
            if len(members) > 1:
                assert area == int(smaller.size[g]) * int(
                    max(arrays.hi[b] for b, _ in members) - min(arrays.lo[b] for b, _ in members)
                )
                ceilings = [int(piece.max_offset[b]) - low for b, low in members]
                assert found.piece.max_offset[g] <= min(ceilings)
            for (low, top, b), (other, end, c) in itertools.combinations(spans, 2):
                apart = top <= other or end <= low
                assert apart or not sections_of_buffer(arrays, b) & sections_of_buffer(arrays, c)
        offsets = np.arange(smaller.n) * 100
        assert found.expand(offsets).tolist() == (offsets[found.group] + found.above).tolist()
    assert fewer > 5


def test_joins_are_drawn_by_chance_and_seed() -> None:
    piece = _listed(*((1 + k, a, a + 1) for k in range(12) for a in (0, 1)), (100, 0, 2), capacity=400)
    pairs = [{2 * k, 2 * k + 1} for k in range(12)]
    drawn = {
        chance: [[pair in _groups(piece, chance=chance, seed=seed) for pair in pairs] for seed in range(30)]
        for chance in (0.0, 0.2, 0.5, 0.8)
    }
    for chance, rows in drawn.items():
        assert abs(np.mean(rows) - chance) < 0.1
    assert len({tuple(row) for row in drawn[0.5]}) > 25
    assert drawn[0.5][7] == [pair in _groups(piece, chance=0.5, seed=7) for pair in pairs]


def test_likely_blocks_are_drawn_by_chance_too() -> None:
    """At each of twelve steps two buffers begin and end together, of sizes that no others have."""
    rows = [(1 + 2 * k + 50 * i, k, k + 1) for k in range(12) for i in (0, 1)]
    piece = _listed(*rows, (300, 0, 12), capacity=900)
    for chance in (0.0, 0.3, 0.7, 1.0):
        drawn = [
            {2 * k, 2 * k + 1} in _groups(piece, chance=chance, seed=seed) for seed in range(20) for k in range(1, 12)
        ]
        assert chance - 0.15 < np.mean(drawn) < 1.2 * chance + 0.2
    assert np.mean([len(_groups(piece, chance=0.3, seed=seed)) for seed in range(20)]) < 9
