"""The branching rule: which section and which buffer come next, against their definitions."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from memplan.solvers import branch_kernel as kernel


def test_a_buffer_can_block_if_some_offset_of_it_does() -> None:
    """It takes bytes of the hole, and the blocked buffer still fits above it."""
    chance = random.Random(1)
    blocked = 0
    for _ in range(3_000):
        hole, size = chance.randrange(8), np.array([chance.randint(1, 5), chance.randint(1, 5)])
        lowest = np.array([chance.randrange(12), 0])
        highest = np.array([lowest[0] + chance.randrange(6), hole + 1 + chance.randrange(8)])
        expected = any(
            at < hole + size[1] and at + size[0] > hole and at + size[0] <= highest[1]
            for at in range(int(lowest[0]), int(highest[0]) + 1)
        )
        assert bool(kernel.can_block(0, 1, hole, lowest, size, highest)) == expected
        blocked += expected
    assert 500 < blocked < 2_500


def test_the_section_with_the_fewest_candidates_goes_first_by_weight_then_by_unplaced_units() -> None:
    for seed in range(400):
        chance = random.Random(seed)
        sections, n, few, capacity = chance.randint(1, 6), 7, chance.randint(1, 5), 12
        inside = [sorted(chance.sample(range(n), chance.randint(0, 5))) for _ in range(sections)]
        ptr = np.cumsum([0, *(len(alive) for alive in inside)])
        mem = np.array([b for alive in inside for b in alive], np.int32)
        reach = np.array([chance.randrange(8) for _ in range(n)])
        placed = np.array([chance.random() < 0.3 for _ in range(n)])
        unplaced = np.array([chance.choice((0, 3, 6, 9)) for _ in range(sections)])
        weight = np.array([chance.randrange(3) for _ in range(sections)])
        keys = {}
        for s in range(sections):
            able = sum(not placed[b] and reach[b] <= capacity - unplaced[s] for b in inside[s])
            if unplaced[s]:
                keys[s] = (max(few - able, 0) * (1 + weight[s]), unplaced[s], -s)
        expected = max(keys, key=lambda s: keys[s]) if keys else -1
        found = kernel.pick_section(few, capacity, reach, unplaced, weight, placed, ptr, mem)
        assert found == expected, seed


def test_a_corner_fits_by_the_floors_at_its_sides() -> None:
    floor = np.array([5, 2, 2, 4])

    def score(at: int, size: int, low: int, high: int) -> int:
        found = kernel._fit(0, np.array([at]), np.array([size]), floor, np.array([low]), np.array([high]))
        return int(found)

    assert score(2, 9, 1, 3) == 4  # walls on both sides
    assert score(2, 3, 1, 3) == 5  # its top meets the left wall's
    assert score(2, 2, 1, 3) == 5  # and the right wall's
    assert score(2, 9, 1, 2) == 2  # open to the right
    assert score(2, 9, 2, 3) == 2
    assert score(5, 9, 1, 3) == 0
    assert score(0, 9, 0, 4) == 4  # both ends of the piece are walls
    assert score(4, 9, 1, 3) == 2  # the left wall alone
    assert score(1, 3, 0, 1) == 4  # the last floor is no neighbour of the first section
    assert score(1, 1, 2, 3) == 5  # floors of 2 and 4 above 1; its top meets the left one's


def _adjacent(n: int, *pairs: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    lists = [[c for pair in pairs for c in pair if b in pair and c != b] for b in range(n)]
    return np.cumsum([0, *map(len, lists)]), np.array([c for near in lists for c in near], np.int32)


def _descend(b: int, *, pairs: tuple[tuple[int, int], ...], size: list[int], **given: list[int]) -> int:
    n = len(size)
    allowed = np.array(given.get("allowed", [0] * n))
    return int(
        kernel._descend(
            b,
            np.array(given.get("reach", allowed.tolist())),
            allowed,
            np.array(given.get("hole", [-1] * n)),
            np.array(size),
            np.array(given.get("maxoff", [50] * n)),
            np.array(given.get("rank", list(range(n)))),
            np.array(given.get("placed", [0] * n), np.bool_),
            *_adjacent(n, *pairs),
        )
    )


def test_what_fits_wholly_below_a_buffer_is_decided_before_it() -> None:
    pairs = ((0, 1), (0, 2))
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 0, 0]) == 1  # 6 units do not fit below 5
    assert _descend(0, pairs=pairs, size=[4, 5, 5], allowed=[5, 0, 0]) == 1
    assert _descend(0, pairs=pairs, size=[4, 5, 5], allowed=[5, 0, 0], rank=[0, 2, 1]) == 2
    assert _descend(0, pairs=pairs, size=[4, 3, 2], allowed=[5, 2, 1]) == 2  # the lower one first
    assert _descend(0, pairs=pairs, size=[4, 5, 5], allowed=[5, 0, 0], placed=[0, 1, 1]) == 0
    assert _descend(0, pairs=pairs, size=[4, 6, 6], allowed=[5, 0, 0]) == 0
    assert _descend(0, pairs=pairs, size=[4, 5, 9], allowed=[5, 0, 0], reach=[5, 1, 0]) == 0
    assert _descend(0, pairs=((0, 1), (1, 2)), size=[4, 2, 2], allowed=[8, 4, 0]) == 2  # and before that one too


def test_a_buffer_skipped_at_its_lowest_offset_waits_for_one_that_can_block_it() -> None:
    pairs = ((0, 1), (0, 2))
    hole = [5, -1, -1]
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 6, 5], hole=hole) == 2
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 9, 9], hole=hole) == -1  # both lie above its hole
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 5, 5], hole=[5, 5, -1]) == 2
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 5, 5], hole=[5, 5, 5]) == -1
    assert _descend(0, pairs=pairs, size=[4, 5, 6], allowed=[5, 5, 5], hole=hole, placed=[0, 1, 1]) == -1


def _pick(*, size: list[int], allowed: list[int], corners: bool = False, section: int = 0, **given: list[int]) -> int:
    """All buffers are alive in two sections; those of `alone` only in the first."""
    n = len(size)
    first = list(range(n))
    second = [b for b in first if b not in given.get("alone", [])]
    pairs = tuple((b, c) for b in range(n) for c in range(b)) if given.get("near") else ()
    return int(
        kernel.pick_buffer(
            section,
            corners,
            np.array(given.get("reach", allowed)),
            np.array(allowed),
            np.array(given.get("hole", [-1] * n)),
            np.array(size),
            np.array([60] * n),
            np.array(given.get("rank", list(range(n)))),
            np.array(given.get("placed", [0] * n), np.bool_),
            np.array(given.get("floor", [0, 0])),
            *_adjacent(n, *pairs),
            np.array([0, n, n + len(second)]),
            np.array(first + second, np.int32),
            np.array([0] * n),
            np.array([2 if b in second else 1 for b in range(n)]),
        )
    )


def test_the_lowest_buffer_of_the_section_goes_first_then_the_one_of_the_first_rank() -> None:
    assert _pick(size=[1, 2, 3], allowed=[4, 2, 3]) == 1
    assert _pick(size=[1, 2, 3], allowed=[2, 2, 2]) == 0
    assert _pick(size=[1, 2, 3], allowed=[2, 2, 2], rank=[2, 1, 0]) == 2
    assert _pick(size=[1, 2, 3], allowed=[2, 2, 2], rank=[2, 1, 0], placed=[0, 0, 1]) == 1
    assert _pick(size=[1, 2, 3], allowed=[1, 2, 2], section=1, alone=[0]) == 1


def test_among_equals_a_buffer_that_fits_its_corner_goes_first() -> None:
    given: dict[str, Any] = {"floor": [0, 3], "alone": [0], "rank": [1, 0]}
    assert _pick(size=[3, 5], allowed=[0, 0], corners=True, **given) == 0  # its top meets the floor beside it
    assert _pick(size=[3, 5], allowed=[0, 0], corners=False, **given) == 1
    assert _pick(size=[3, 5], allowed=[1, 0], corners=True, **given) == 1  # the lower one, whatever the corner


def test_if_every_way_is_skipped_the_lowest_that_is_not_skipped_goes_first() -> None:
    assert _pick(size=[1, 2, 3], allowed=[0, 4, 3], hole=[0, -1, -1]) == 2
    assert _pick(size=[1, 2, 3], allowed=[0, 3, 3], hole=[0, -1, -1], rank=[0, 2, 1]) == 2
    assert _pick(size=[1, 2, 3], allowed=[0, 3, 3], hole=[0, -1, -1]) == 1
    assert _pick(size=[1, 2, 3], allowed=[0, 3, 4], hole=[0, -1, -1], placed=[0, 1, 0]) == 2
    assert _pick(size=[1, 2, 3], allowed=[0, 3, 4], hole=[0, 3, 4]) == -1
