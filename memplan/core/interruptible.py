"""CP-SAT that an interrupt ends: the one place that runs it."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


def run(solver: cp_model.CpSolver, model: cp_model.CpModel) -> Any:
    """Solve `model` and return the status; an interrupt stops the search and is raised.

    By itself CP-SAT takes over SIGINT: it ends the search as if a limit were reached, the caller goes on, and Python
    never hears of an interrupt again. So it runs on a thread of its own, and the caller's waits for signals.
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
        done.wait()  # an interrupt in `join` would leave Python 3.11 taking the thread for one that has ended
    except BaseException:
        solver.stop_search()
        while not done.wait(0.05):  # a search that had not begun yet did not hear of it
            solver.stop_search()
        raise
    finally:
        thread.join()
    if failed:
        raise failed[0]
    return found[0]
