"""`refusal`: what the validator says of a heuristic's answer, before the portfolio keeps it.

An answer that is refused is a bug of memplan, and must not cost the user the plan: it is dropped with a
`SolverFault`, a warning that asks for a report, and the portfolio goes on with what it has.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from memplan.core.problem import Problem, Solution, Status
from memplan.core.validate import validate
from memplan.errors import InvalidSolution, SolverFault


def refusal(problem: Problem, offsets: Mapping[str, int]) -> str | None:
    """Why `offsets` (bytes) are no valid placement, whatever the capacity; None if they are one."""
    end = max((offsets[b.id] + b.size for b in problem.buffers), default=0)
    # UNKNOWN claims nothing about the capacity, which the best answer so far may well exceed.
    answer = Solution(offsets=offsets, arena_size=end, status=Status.UNKNOWN, bound=problem.max_live, solver="")
    try:
        validate(problem, answer)
    except InvalidSolution as error:
        return str(error)
    return None


def warn_of_fault(what: str) -> None:
    """Warn that a part of the solver is wrong, and ask for a report."""
    warnings.warn(
        f"{what}; this was dropped, and what is returned does not rest on it. It is a bug in memplan: please report "
        "it, if you can with the buffers (sizes, lifetimes, gaps, alignments, pins)",
        SolverFault,
        stacklevel=3,
    )
