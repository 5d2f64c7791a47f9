"""Large problems: a fixed share of the sweep in `benchmarks/solver_sweep.py`, and the ones that once failed."""

from __future__ import annotations

import random

import pytest

from benchmarks.solver_sweep import checked, generated
from memplan.core.problem import Buffer, Interval, Problem


@pytest.mark.parametrize("seed", range(6))
def test_a_share_of_the_sweep_is_valid_without_a_dropped_answer(seed: int) -> None:
    problem = generated(seed, most=12_000)
    assert checked(problem, work_limit=20_000).arena_size >= problem.max_live


@pytest.mark.parametrize("seed", range(2))
def test_a_large_piece_above_a_buffer_that_lives_throughout(seed: int) -> None:
    """More pairs alive together than are fitted one by one: once placed into the long buffer's bytes."""
    chance, n = random.Random(seed), 4_000
    buffers = [Buffer(id="long", size=4100, live=Interval(0, 2 * n))]
    for i in range(n):
        start = chance.randrange(2 * n - 3000)
        live = Interval(start, start + chance.randrange(400, 3000))
        buffers.append(Buffer(id=str(i), size=chance.choice((4, 640, 4096, 1 << 20, 3 << 20)), live=live))
    solution = checked(Problem(buffers=tuple(buffers)), work_limit=None)
    assert solution.arena_size <= 1.02 * solution.bound
