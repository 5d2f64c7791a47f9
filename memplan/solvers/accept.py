"""`refusal`: checks the placement of a heuristic with the validator, before the portfolio keeps it.

A placement that is refused is a bug of memplan, but the user must still get a plan: the placement is dropped with a
`SolverFault`, a warning that asks for a report, and the portfolio goes on with the other placements.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from memplan.core.problem import Problem, Solution, Status
from memplan.core.validate import validate
from memplan.errors import InvalidSolution, SolverFault


def refusal(problem: Problem, offsets: Mapping[str, int]) -> str | None:
    """The reason that `offsets` (bytes) are not a valid placement, or None if they are. The capacity is ignored."""
    end = max((offsets[b.id] + b.size for b in problem.buffers), default=0)
    # UNKNOWN claims nothing about the capacity, which the best placement so far may exceed.
    answer = Solution(offsets=offsets, arena_size=end, status=Status.UNKNOWN, bound=problem.max_live, solver="")
    try:
        validate(problem, answer)
    except InvalidSolution as error:
        return str(error)
    return None


def warn_of_fault(what: str) -> None:
    """Warn that a part of the solver has a bug, and ask for a report."""
    warnings.warn(
        f"{what}; this was dropped, and what is returned does not rest on it. It is a bug in memplan: please report "
        "it, if you can with the buffers (sizes, lifetimes, gaps, alignments, pins)",
        SolverFault,
        stacklevel=3,
    )
