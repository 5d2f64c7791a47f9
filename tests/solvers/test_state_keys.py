"""Keys of states and their table, against their definitions."""

from __future__ import annotations

import random

import numpy as np

from memplan.solvers import branch_kernel as kernel


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


def test_the_key_of_a_state_is_the_sum_over_its_unplaced_buffers() -> None:
    placed = np.array([False, False, False, False, True])
    allowed, hole = np.array([4, 5, 6, 7, 8]), np.array([-1, 3, -1, 2, 1])
    expected = 9 + sum(_mixed(b, int(allowed[b]), int(hole[b])) for b in range(4))
    assert (int(kernel.key_of(9, placed, allowed, hole)) - expected) % (1 << 64) == 0
