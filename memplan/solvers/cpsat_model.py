"""Solves the offset-assignment problem with CP-SAT (Google OR-Tools): minimizes the arena, or decides a capacity.

Every segment of a live interval is an interval in time, every buffer an interval in offsets, and no two of the
rectangles overlap. There is one worker and a limit in deterministic time, so that every run has the same result.

An interrupt (Ctrl-C) stops the search (`run`).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np

from memplan.solvers.arrays import Ints, PieceOutcome, ProblemArrays, lower_bound
from memplan.solvers.base import WorkBudget

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Solve `model` and return the status. An interrupt stops the search and is raised.

    By default CP-SAT installs its own SIGINT handler: an interrupt ends the search as if a limit were reached, the
    caller goes on, and Python receives no later interrupt. Therefore CP-SAT runs on a thread of its own, while the
    calling thread waits and receives signals.
    """
    solver.parameters.catch_sigint_signal = False
    found: list[Any] = []
    failed: list[Exception] = []
    done = threading.Event()

    def work() -> None:
        try:
            found.append(solver.solve(model))
        except Exception as error:  # raised below, by the caller's thread
            failed.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="cp-sat", daemon=True)
    thread.start()
    try:
        done.wait()  # not `join`: after an interrupt in it, Python 3.11 treats the thread as ended
    except BaseException:
        solver.stop_search()
        while not done.wait(0.05):  # a search that had not begun yet ignored the first call
            solver.stop_search()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


_UNITS_PER_SECOND = 200_000  # units of work for one second of CP-SAT's deterministic time
_LEAST_SECONDS = 0.05  # the shortest time limit that is worth a start


def minimise(arrays: ProblemArrays, hint: Ints, budget: WorkBudget) -> tuple[PieceOutcome, Ints, int]:
    """Minimize the arena of `arrays`, starting from the valid offsets `hint` (units).

    Returns the outcome, the offsets (units) and a lower bound of the arena in bytes.
    """
    arena = int((hint * arrays.unit + arrays.raw).max())
    model, offsets = _model(arrays, arrays.max_offset(arena), hint)
    bound = lower_bound(arrays)
    top = model.new_int_var(bound, arena, "arena")
    for offset, raw in zip(offsets, arrays.raw.tolist(), strict=True):
        model.add(top >= offset * arrays.unit + raw)
    model.minimize(top)
    outcome, found, proven = _run(model, offsets, budget)
    return outcome, found, max(bound, proven)


def decide(arrays: ProblemArrays, max_offset: Ints, hint: Ints, budget: WorkBudget) -> tuple[PieceOutcome, Ints]:
    """Place `arrays` (offsets in units, at most `max_offset`), or prove that no placement exists."""
    model, offsets = _model(arrays, max_offset, np.minimum(hint, max_offset))
    outcome, found, _ = _run(model, offsets, budget)
    return outcome, found


def _model(arrays: ProblemArrays, max_offset: Ints, hint: Ints) -> tuple[cp_model.CpModel, list[cp_model.LinearExprT]]:
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    offsets: list[cp_model.LinearExprT] = []
    in_time, in_space = [], []
    columns = (arrays.size, arrays.align, arrays.low, max_offset, hint)
    for b, (size, align, low, high, near) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        step = model.new_int_var(-(-low // align), high // align, f"offset{b}")
        model.add_hint(step, near // align)
        offsets.append(step * align)
        for k in range(int(arrays.seg_ptr[b]), int(arrays.seg_ptr[b + 1])):
            start, end = int(arrays.seg_lo[k]), int(arrays.seg_hi[k])
            in_time.append(model.new_fixed_size_interval_var(start, end - start, f"time{k}"))
            in_space.append(model.new_fixed_size_interval_var(step * align, size, f"space{k}"))
    model.add_no_overlap_2d(in_time, in_space)
    return model, offsets


def _run(
    model: cp_model.CpModel, offsets: list[cp_model.LinearExprT], budget: WorkBudget
) -> tuple[PieceOutcome, Ints, int]:
    from ortools.sat.python import cp_model

    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    seconds, work = budget.remaining_seconds(), budget.remaining_work()
    if seconds is not None:
        solver.parameters.max_time_in_seconds = max(seconds, _LEAST_SECONDS)
    if work is not None:
        solver.parameters.max_deterministic_time = max(work / _UNITS_PER_SECOND, _LEAST_SECONDS)
    status = run(solver, model)
    budget.spend(int(solver.deterministic_time * _UNITS_PER_SECOND), 1)
    if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        bound = round(solver.best_objective_bound) if model.has_objective() else 0
        return PieceOutcome.SOLVED, np.array([solver.value(offset) for offset in offsets], np.int64), bound
    outcome = PieceOutcome.EXHAUSTED if status == cp_model.INFEASIBLE else PieceOutcome.LIMIT
    return outcome, np.zeros(0, np.int64), 0
