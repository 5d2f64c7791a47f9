"""Large problems are searched through their core: what is alive in the busiest sections, and the rest around it."""

from __future__ import annotations

import pytest

from benchmarks.instances import mixed_lives
from memplan.core.validate import validate
from memplan.solvers import solve, thresholds
from tests.slow import slow


@pytest.mark.parametrize("seed", [0, *map(slow, range(1, 4))])
def test_a_large_problem_reaches_max_live_through_its_core(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Long and short lives mixed: first-fit alone ends far above."""
    problem = mixed_lives(1_500, seed=seed)
    greedy = solve(problem, solver="greedy")
    monkeypatch.setattr(thresholds, "LARGE", 200)
    solution = solve(problem, work_limit=400_000)
    validate(problem, solution)
    assert greedy.gap > 0.01
    assert solution.gap < greedy.gap / 4
