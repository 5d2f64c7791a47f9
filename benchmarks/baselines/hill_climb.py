"""`hill-climb`: TVM's unified static memory planner (USMP), its hill-climbing algorithm.

It starts from first-fit by descending size. Then it repeatedly exchanges, in the order, a buffer at the top of the
arena with one that is alive together with it, or with a neighbour of such a buffer. It keeps an order that is not
worse, and with falling probability one that is (tvm `src/tir/usmp/algo/hill_climb.cc`: 500 attempts).
"""

from __future__ import annotations

import random
import time

from memplan.core.problem import Buffer, Problem, Solution
from memplan.solvers.base import NO_LIMITS, SolverLimits, WorkBudget, finish
from memplan.solvers.baselines import in_order

_ATTEMPTS = 500


class HillClimb:
    """Places buffers by hill climbing. It is deterministic for a seed unless the time limit ends it."""

    name = "hill-climb"

    def refuses(self, problem: Problem) -> str | None:
        return None

    def solve(self, problem: Problem, *, limits: SolverLimits = NO_LIMITS, seed: int = 0) -> Solution:
        began = time.perf_counter()
        budget = WorkBudget(limits)
        chance = random.Random(seed)
        order = sorted(problem.buffers, key=lambda b: (-b.size, -len(b.live)))
        offsets = best = in_order(problem, order)
        arena = best_arena = _arena(problem, offsets)
        for turn in range(_ATTEMPTS):
            if best_arena <= problem.max_live or (limits.seconds is not None and budget.is_over):
                break
            swapped = _swapped(problem, order, offsets, arena, chance)
            tried = in_order(problem, swapped)
            height = _arena(problem, tried)
            if height <= arena or chance.random() < 0.5 * (1 - turn / _ATTEMPTS) ** 2:
                order, offsets, arena = swapped, tried, height
            if height < best_arena:
                best, best_arena = tried, height
        return finish(problem, best, solver=self.name, seconds=time.perf_counter() - began)


def _arena(problem: Problem, offsets: dict[str, int]) -> int:
    return max((offsets[b.id] + b.size for b in problem.buffers), default=0)


def _swapped(
    problem: Problem, order: list[Buffer], offsets: dict[str, int], arena: int, chance: random.Random
) -> list[Buffer]:
    """`order` with a topmost buffer and a first- or second-level neighbour of it exchanged."""
    places = range(len(order))
    top = chance.choice([i for i in places if offsets[order[i].id] + order[i].size == arena])
    first = [i for i in places if i != top and not order[i].live.is_disjoint(order[top].live)]
    chosen = chance.choice(first) if first else top
    if first and chance.random() < 0.5:
        via = order[chosen].live
        chosen = chance.choice([i for i in places if i != top and not order[i].live.is_disjoint(via)])
    order = list(order)
    order[top], order[chosen] = order[chosen], order[top]
    return order
