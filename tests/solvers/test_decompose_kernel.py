"""Keys of states, their table, and the split into independent components, against their definitions."""

from __future__ import annotations

import itertools
import random

import numpy as np

from memplan.solvers.search import decompose_kernel as kernel


def _mixed(b: int, allowed: int, hole: int) -> int:
    """The key in exact arithmetic, wrapped to 64 bits: a hash of the three numbers, finished as splitmix64 does."""
    x = (b + 1) * -7046029254386353131 ^ (allowed + 1) * -4417276706812531889 ^ (hole + 2) * 1609587929392839161
    x %= 1 << 64
    x = (x ^ (x >> 31 & 0x1FFFFFFFF)) * -4658895280553007687 % (1 << 64)
    x = (x ^ (x >> 27 & 0x1FFFFFFFFF)) * -7723592293110705685 % (1 << 64)
    return x ^ (x >> 31 & 0x1FFFFFFFF)


def test_keys_are_the_same_on_every_machine() -> None:
    """Likely joins are drawn with them: equal seeds must give equal plans, compiled or not."""
    chance = random.Random(0)
    for _ in range(300):
        b, allowed, hole = (chance.randrange(1 << bits) for bits in (12, 40, 40))
        assert int(kernel.mix(b, allowed, hole - 1)) % (1 << 64) == _mixed(b, allowed, hole - 1)


def test_keys_of_states_differ_in_their_low_bits_too() -> None:
    states = list(itertools.product(range(12), range(12), range(-1, 11)))
    keys = [int(kernel.mix(*state)) for state in states]
    assert len(set(keys)) == len(states)
    assert all(abs(sum(key >> bit & 1 for key in keys) / len(keys) - 0.5) < 0.06 for bit in range(64))


def test_a_table_finds_what_it_stored_and_overwrites_when_four_slots_are_taken() -> None:
    table = np.zeros(16, np.int64)
    for place, key in ((13, 13), (14, 29), (15, 45), (0, 61)):  # the same first slot, and round the end
        assert kernel.slot(table, np.int64(key)) == place
        table[place] = key
        assert kernel.slot(table, np.int64(key)) == place
    assert kernel.slot(table, np.int64(77)) == 13
    assert kernel.slot(table, np.int64(16)) == 1
    assert kernel.slot(table, np.int64(-14)) == 2  # keys may be negative


def test_the_key_of_a_component_is_the_sum_over_its_unplaced_buffers() -> None:
    born = np.array([0, 2, 3, 5, 2])
    placed = np.array([False, False, False, False, True])
    allowed, hole = np.array([4, 5, 6, 7, 8]), np.array([-1, 3, -1, 2, 1])
    for low, high in itertools.combinations(range(7), 2):
        inside = [b for b in range(5) if not placed[b] and low <= born[b] < high]
        expected = 9 + sum(_mixed(b, int(allowed[b]), int(hole[b])) for b in inside)
        found = int(kernel.key_of(low, high, 9, born, placed, allowed, hole))
        assert (found - expected) % (1 << 64) == 0, (low, high)


def _parts(crossed: list[int], counts: list[int]) -> list[tuple[int, int, int]]:
    """(first section, end, buffers) of the parts between uncrossed boundaries, smallest first, none empty."""
    edges = [0, *(s + 1 for s, c in enumerate(crossed) if not c), len(crossed) + 1]
    found = [(a, b, sum(counts[a:b])) for a, b in itertools.pairwise(edges)]
    return sorted((part for part in found if part[2]), key=lambda part: part[2])


def test_a_component_splits_where_no_unplaced_buffer_crosses() -> None:
    split = 0
    for seed in range(200):
        chance = random.Random(seed)
        sections = chance.randint(2, 8)
        before = chance.randint(0, 2)  # sections of another component, before this one
        n = chance.randint(1, 8)
        lo = [before + chance.randrange(sections) for _ in range(n)]
        hi = [min(a + chance.randint(1, 3), before + sections) for a in lo]
        placed = np.array([chance.random() < 0.3 for _ in range(n)])
        kept = [(a, b) for a, b, gone in zip(lo, hi, placed.tolist(), strict=True) if not gone]
        cross = np.array([sum(a <= s < b - 1 for a, b in kept) for s in range(before + sections)], np.int64)
        cross[before + sections - 1] = chance.randint(0, 1)  # says nothing about this component
        counts = [sum(a == s for a, _ in kept) for s in range(before + sections)]
        columns = [np.full(24, -7, np.int64) for _ in range(5)]
        old = chance.randint(0, 2)
        c_lo, c_hi, c_next, c_owner, c_count = columns
        c_lo[old], c_hi[old], c_next[old] = before, before + sections, 99
        cells = kernel.split(old, 3, 5, cross, placed, np.array(lo), c_lo, c_hi, c_next, c_owner, c_count)
        parts = _parts(cross[before : before + sections - 1].tolist(), counts[before:])
        expected = [(a + before, b + before, count) for a, b, count in parts]
        if len(expected) < 2:
            assert cells == 3, seed
            continue
        split += 1
        assert cells == 3 + len(expected), seed
        assert list(zip(*(c[3:cells].tolist() for c in (c_lo, c_hi, c_count)), strict=True)) == expected, seed
        assert c_next[3:cells].tolist() == [*range(4, cells), 99]
        assert c_owner[3:cells].tolist() == [5] * len(expected)
    assert split > 60
