"""Runs a scenario in several processes, one for each rank of a gloo process group, and never hangs.

A scenario is a function of `tests.distributed.scenarios` (or of another module); what it returns comes back as JSON.
All ranks share one deadline. When one rank fails, the others get a short while to fail by themselves, so that their
logs say what they saw, and are then killed. Run a scenario alone with

    python -m tests.distributed.launcher 2 tests.distributed.scenarios NAME
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

from benchmarks.preloaded import start

_ROOT = Path(__file__).parents[2]
_RESULT = "RESULT "  # the line with what a rank returned begins so
_POLL = 0.05  # seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """The outcome of a scenario: by rank, what it returned (None: nothing), its exit status and its log."""

    results: list[Any]
    statuses: list[int]
    logs: list[str] = field(repr=False)

    @property
    def text(self) -> str:
        """The logs of all ranks, for the message of an assertion."""
        return "\n".join(
            f"--- rank {i}, exit status {status}\n{log}"
            for i, (status, log) in enumerate(zip(self.statuses, self.logs, strict=True))
        )


def launch(
    scenario: str,
    *arguments: str,
    ranks: int = 2,
    module: str = "tests.distributed.scenarios",
    timeout: float = 300,
    grace: float = 15,
    fails: bool = False,
    fresh: bool = False,
) -> Ranks:
    """Run a scenario on `ranks` processes and return what they did.

    `timeout`: the seconds that all ranks have. `grace`: the seconds that the others have once a rank has failed.
    `fails`: a rank may exit with an error, or be killed; otherwise that raises `AssertionError` with all logs.
    `fresh`: each rank is an interpreter of its own, with a seed of string hashes of its own.
    """
    with tempfile.TemporaryDirectory() as folder:
        processes, files = _start(
            Path(folder), scenario, arguments, ranks=ranks, module=module, timeout=timeout, fresh=fresh
        )
        try:
            deadline = time.monotonic() + timeout
            while any(p.exitcode is None for p in processes) and time.monotonic() < deadline:
                if any(p.exitcode for p in processes):
                    deadline, grace = min(deadline, time.monotonic() + grace), timeout
                time.sleep(_POLL)
        finally:
            failed = any(p.exitcode for p in processes)
            late = [i for i, p in enumerate(processes) if p.exitcode is None]
            for p in processes:
                p.kill()
                p.join()
        logs = [path.read_text(errors="replace") for path in files]
    statuses = [cast(int, p.exitcode) for p in processes]
    found = Ranks(results=[_result_of(log) for log in logs], statuses=statuses, logs=logs)
    assert failed or not late, f"ranks {late} did not end in time\n{found.text}"
    assert fails or not any(found.statuses), found.text
    return found


def _start(
    folder: Path, scenario: str, arguments: Sequence[str], *, ranks: int, module: str, timeout: float, fresh: bool
) -> tuple[list[BaseProcess], list[Path]]:
    """Start the ranks; they meet in a file, so that no two launches can take the same port."""
    processes, files = [], []
    for rank in range(ranks):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "MEMPLAN_RENDEZVOUS": str(folder / "rendezvous"),
            "MEMPLAN_SECONDS": str(0.9 * timeout),
        }
        files.append(folder / f"rank{rank}.log")
        command = ["-", module, scenario, *arguments]
        processes.append(
            start(__spec__.name, command, log=files[-1], folder=_ROOT, environment=environment, fresh=fresh)
        )
    return processes, files


def _result_of(log: str) -> Any:
    lines = [line for line in log.splitlines() if line.startswith(_RESULT)]
    return json.loads(lines[-1].removeprefix(_RESULT)) if lines else None


def _run_rank(module: str, scenario: str, arguments: Sequence[str]) -> None:
    """Be one rank: join the group, run the scenario, and write what it returns as a line of the log."""
    if module.endswith(".bare"):
        getattr(importlib.import_module(module), scenario)(*arguments)
        return
    import torch
    from torch import distributed

    faulthandler.dump_traceback_later(float(os.environ["MEMPLAN_SECONDS"]))  # where it waits, if it hangs
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{os.environ['MEMPLAN_RENDEZVOUS']}",
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=datetime.timedelta(seconds=30),
    )
    function = getattr(importlib.import_module(module), scenario)
    result = function(*arguments)
    print(_RESULT + json.dumps(result), flush=True)
    with contextlib.suppress(RuntimeError):  # another rank may be gone, which is then what its log says
        distributed.destroy_process_group()


if __name__ == "__main__":
    if sys.argv[1] == "-":
        _run_rank(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        seconds = float(os.environ.get("MEMPLAN_SECONDS", "120"))
        done = launch(
            sys.argv[3], *sys.argv[4:], ranks=int(sys.argv[1]), module=sys.argv[2], timeout=seconds, fails=True
        )
        print(done.text)
