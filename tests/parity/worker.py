"""A process that judges cases, one after the other, and says each verdict on its standard output as it is found.

The process limits its own CPU time anew for each case: what uses more is ended by the operating system (SIGXCPU), in
compiled code as well, and whoever reads its output knows which case that was.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import warnings
from dataclasses import asdict
from typing import Any, TextIO

# Where a worker has grown above this, it ends and another goes on: compiled programs leave traces in torch.
_MOST_BYTES = 3 << 30


def main() -> None:
    """Read the task, one line of JSON, from the standard input and work it off."""
    task = json.loads(sys.stdin.readline())
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what operators print is no answer
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    work(task, answers)


def work(task: dict[str, Any], answers: TextIO) -> None:
    """Judge the cases of the task's selection that are not done yet, until there are none or memory is short."""
    from tests.parity.cases import Selection
    from tests.parity.contest import verdict_on

    done = set(task["done"])
    selection = Selection(**{**task["selection"], "names": tuple(task["selection"]["names"])})
    for case in selection.cases():
        if case.name in done:
            continue
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 > _MOST_BYTES:
            _say(answers, {"again": True})
            return
        _say(answers, {"begins": case.name})
        began = time.process_time()
        _, hard = resource.getrlimit(resource.RLIMIT_CPU)
        resource.setrlimit(resource.RLIMIT_CPU, (int(began) + 1 + task["seconds"], hard))
        verdict = asdict(verdict_on(case))
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        _say(answers, {"verdict": {**verdict, "seconds": round(time.process_time() - began, 3)}})
    _say(answers, {"again": False})


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")


if __name__ == "__main__":
    main()
