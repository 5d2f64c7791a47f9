"""Large generated problems through the default solver, each solution validated: `python -m benchmarks.solver_sweep`.

2,000 to 60,000 buffers, short and long lives mixed, with gaps, alignments and pins. An answer of any heuristic that
is dropped (`SolverFault`) and a solution that is refused end the run. The tests run a small, fixed share
(`tests/solvers/test_sweep.py`).
"""

from __future__ import annotations

import argparse
import random
import time
import warnings

from benchmarks.instances import mixed
from memplan.core.problem import Problem, Solution
from memplan.core.validate import validate
from memplan.errors import SolverFault
from memplan.solvers import solve

MOST = 60_000  # buffers


def generated(seed: int, *, most: int = MOST) -> Problem:
    """The problem of this number: 2,000 to `most` buffers, small ones as often as large ones."""
    chance = random.Random(seed)
    n = round(2_000 * (most / 2_000) ** chance.random())
    longest = chance.choice((50, 400, 3_000, None))
    if n > 20_000:
        longest = min(longest or 3_000, 3_000)
    return mixed(n, seed=seed, pins=chance.choice((0, 0, 0, 5)), longest=longest)


def checked(problem: Problem, *, work_limit: int | None) -> Solution:
    """The default solver's solution, validated; raises `SolverFault` if an answer was dropped on the way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SolverFault)
        solution = solve(problem, work_limit=work_limit)
    validate(problem, solution)
    return solution


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=40, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--most", type=int, default=MOST, help="buffers of a problem at most")
    parser.add_argument("--work", type=int, default=200_000, help="the solver's limit in units of work")
    options = parser.parse_args()
    for seed in range(options.first, options.first + options.problems):
        problem = generated(seed, most=options.most)
        began = time.perf_counter()
        solution = checked(problem, work_limit=options.work)
        print(
            f"{seed:4} {len(problem.buffers):6} buffers  {solution.status.name:8} "
            f"gap {solution.gap:7.2%}  {time.perf_counter() - began:6.1f} s"
        )


if __name__ == "__main__":
    main()
