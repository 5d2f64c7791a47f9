"""An interrupt ends CP-SAT at once, and reaches whoever waits for it."""

from __future__ import annotations

import signal
import threading
import time

import pytest
from ortools.sat.python import cp_model

from memplan.solvers.cpsat_model import run

_LIMIT = 120.0


def _pigeons(count: int) -> cp_model.CpModel:
    """One pigeon more than holes: no answer, and a search that takes long to prove it."""
    model = cp_model.CpModel()
    inside = [[model.new_bool_var("") for _ in range(count)] for _ in range(count + 1)]
    for pigeon in inside:
        model.add_bool_or(pigeon)
    for hole in range(count):
        for i in range(count + 1):
            for j in range(i):
                model.add_bool_or([~inside[i][hole], ~inside[j][hole]])
    return model


def _solver() -> cp_model.CpSolver:
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.cp_model_presolve = False
    solver.parameters.symmetry_level = 0
    solver.parameters.max_time_in_seconds = _LIMIT
    return solver


def test_an_interrupt_stops_the_search_and_is_raised() -> None:
    before, began = signal.getsignal(signal.SIGINT), time.process_time()
    caller = threading.get_ident()
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(caller, signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(_solver(), _pigeons(13))
    timer.join()
    assert time.process_time() - began < _LIMIT / 2  # it did not search until its limit
    assert not any(thread.name == "cp-sat" for thread in threading.enumerate())
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):  # the next one is heard too
        signal.raise_signal(signal.SIGINT)


def test_what_is_found_is_returned_and_what_fails_is_raised() -> None:
    solver = _solver()
    assert run(solver, _pigeons(3)) == cp_model.INFEASIBLE
    with pytest.raises(AttributeError):
        run(solver, None)  # type: ignore[arg-type]
