"""Runs CP-SAT so that an interrupt (Ctrl-C) stops it. All code that uses CP-SAT runs it through here."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

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
