"""The default solver: always a valid plan, within its limits, with a proof when there is one."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import pytest

from benchmarks.instances import network, planted, scattered, tiled
from memplan.core.problem import Buffer, Interval, Problem, Status
from memplan.core.validate import validate
from memplan.solvers import Progress, solve, thresholds


def _without_capacity(problem: Problem) -> Problem:
    return Problem(buffers=problem.buffers)


def test_no_time_at_all_still_gives_a_valid_plan() -> None:
    problem = planted(300, seed=1)
    solution = solve(_without_capacity(problem), time_limit=0)
    assert solution.status is Status.FEASIBLE
    assert solution.arena_size <= solve(_without_capacity(problem), solver="greedy").arena_size


@pytest.mark.parametrize("seed", range(4))
def test_planted_perfect_packings_are_found(seed: int) -> None:
    problem = planted(100, seed=seed)
    solution = solve(problem, work_limit=2_000_000)
    assert (solution.status, solution.arena_size) == (Status.OPTIMAL, problem.capacity)


def test_networks_reach_max_live() -> None:
    problem = network(60, seed=1)
    solution = solve(problem)
    assert (solution.status, solution.arena_size) == (Status.OPTIMAL, problem.max_live)


def test_large_problems_that_do_not_split_are_searched_through_their_busiest_sections() -> None:
    problem = scattered(5_000, seed=2)
    greedy = solve(problem, solver="greedy")
    solution = solve(problem)
    assert problem.max_live < greedy.arena_size
    assert solution.arena_size == problem.max_live


def test_repeated_layers_do_not_change_the_arena() -> None:
    layer = planted(60, seed=3)
    once = solve(_without_capacity(layer), work_limit=500_000)
    many = solve(tiled(layer, 20), work_limit=500_000)
    assert once.arena_size == many.arena_size == layer.capacity


def test_work_limits_are_reproducible() -> None:
    problem = _without_capacity(planted(150, seed=7, density=0.95))
    one, two = (solve(problem, work_limit=30_000, seed=5) for _ in range(2))
    assert one == two


@pytest.mark.parametrize("rises", [False, True])
def test_each_progress_report_is_better_and_the_last_is_the_solution(
    monkeypatch: pytest.MonkeyPatch, rises: bool
) -> None:
    """`rises`: the bound, where the search proves that max live is too little."""
    monkeypatch.setattr(thresholds, "SMALL", 0)
    problem = _find_above_max_live() if rises else _without_capacity(planted(80, seed=2))
    heard: list[Progress] = []
    solution = solve(problem, on_progress=heard.append)
    known = [(p.incumbent, p.bound) for p in heard]
    assert len(known) > 1
    for (arena, bound), (next_arena, next_bound) in pairwise(known):
        assert arena is not None
        assert next_arena is not None
        assert (next_arena < arena, next_bound > bound) in ((True, False), (False, True))
        assert next_arena <= arena
        assert next_bound >= bound
    assert known[-1] == (solution.arena_size, solution.bound)
    assert (known[0][1] < known[-1][1]) == rises
    assert [p.seconds for p in heard] == sorted(p.seconds for p in heard)


def test_with_a_capacity_the_first_placement_that_fits_is_enough() -> None:
    problem = planted(120, seed=4)
    roomy = Problem(buffers=problem.buffers, capacity=problem.max_live * 2)
    heard: list[Progress] = []
    loose = solve(roomy, on_progress=heard.append)
    assert loose.arena_size <= problem.max_live * 2
    assert len(heard) <= 1
    assert solve(roomy, minimize=True, work_limit=2_000_000).arena_size == problem.max_live


def test_infeasible_names_the_step_and_the_buffers() -> None:
    made = [Buffer(id=f"b{i}", size=10, live=Interval(i, i + 3)) for i in range(6)]
    problem = Problem(buffers=tuple(made), capacity=29)
    solution = solve(problem)
    assert solution.status is Status.INFEASIBLE
    assert solution.proof is not None
    assert (solution.proof.step, solution.proof.ids, solution.proof.needed) == (2, ("b0", "b1", "b2"), 30)


def test_alignment_raises_the_bound_above_max_live() -> None:
    made = [Buffer(id=f"b{i}", size=33, live=Interval(0, 2), alignment=64) for i in range(3)]
    solution = solve(made)
    assert (solution.arena_size, solution.bound, solution.status) == (161, 161, Status.OPTIMAL)
    refused = solve(made, capacity=160)
    assert (refused.status, refused.proof) == (Status.INFEASIBLE, None)


def test_a_search_that_exhausts_a_capacity_raises_the_bound() -> None:
    problem = _find_above_max_live()
    solution = solve(problem)
    assert solution.status is Status.OPTIMAL
    assert solution.bound == solution.arena_size > problem.max_live
    refused = solve(Problem(buffers=problem.buffers, capacity=problem.max_live))
    assert refused.status is Status.INFEASIBLE


def _find_above_max_live() -> Problem:
    # An odd cycle, which gaps allow: a meets b at step 0, b meets c at step 2, c meets a at step 4.
    return Problem(
        buffers=(
            Buffer(id="a", size=2, live=Interval(0, 5), gaps=(Interval(1, 4),)),
            Buffer(id="b", size=2, live=Interval(0, 3)),
            Buffer(id="c", size=2, live=Interval(2, 5)),
        )
    )


def test_pinned_buffers_stay_and_the_others_go_around() -> None:
    made = (
        Buffer(id="pin", size=10, live=Interval(0, 9), pinned_offset=20),
        Buffer(id="low", size=20, live=Interval(0, 5)),
        Buffer(id="later", size=15, live=Interval(5, 9)),
        Buffer(id="high", size=8, live=Interval(3, 7)),
    )
    solution = solve(made)
    assert solution.offsets["pin"] == 20
    assert (solution.arena_size, solution.status) == (38, Status.OPTIMAL)


def test_empty_and_weightless_problems() -> None:
    assert solve(()).arena_size == 0
    nothing = Buffer(id="nothing", size=0, live=Interval(0, 1))
    solution = solve((nothing,))
    assert (dict(solution.offsets), solution.status) == ({"nothing": 0}, Status.OPTIMAL)


def test_small_problems_are_solved_without_numba() -> None:
    code = (
        "import sys; from memplan.solvers import solve; from memplan.core.problem import Buffer, Interval\n"
        "made = [Buffer(id=str(i), size=i + 1, live=Interval(i, i + 2)) for i in range(50)]\n"
        "print(solve(made).status.name, 'numba' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["OPTIMAL", "False"]


def test_the_solution_is_valid_at_every_budget() -> None:
    problem = _without_capacity(planted(200, seed=9, density=0.95))
    for work in (0, 1, 100, 5_000, 50_000):
        validate(problem, solve(problem, work_limit=work))
