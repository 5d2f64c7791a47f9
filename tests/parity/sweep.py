"""Running a selection of cases in worker processes, whatever becomes of these."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from benchmarks.results import fingerprint_of
from tests.parity.cases import Selection
from tests.parity.verdicts import Result, Verdict

ROOT = Path(__file__).resolve().parents[2]
WORKER = (sys.executable, "-m", "tests.parity.worker")
# CPU seconds that a case may take: the slowest needs a third of it.
CPU_SECONDS = 60
# A worker that says nothing for so long waits for something that will not happen. The limit of a case is CPU time.
_SILENCE = 1200


def sweep(
    selection: Selection, *, done: Collection[str] = (), seconds: int = CPU_SECONDS, worker: Sequence[str] = WORKER
) -> Iterator[Verdict]:
    """The verdicts on the selected cases that are not `done`, as they are found.

    A case that ends its worker gets the verdict that says how, and another worker goes on with the next.
    """
    seen = list(done)
    while True:
        run = _Run()
        for verdict in run.verdicts({"selection": asdict(selection), "done": seen, "seconds": seconds}, worker):
            seen.append(verdict.case)
            yield verdict
        if run.finished:
            return


@dataclass(slots=True)
class _Run:
    """One worker, from its start to its end."""

    finished: bool = False
    current: str | None = None
    _silent: bool = field(default=False)

    def verdicts(self, task: dict[str, Any], worker: Sequence[str]) -> Iterator[Verdict]:
        again = False
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                worker, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            try:
                process.stdin.write(json.dumps(task).encode() + b"\n")
                process.stdin.close()
                for message in self._messages(process.stdout):
                    again = message.get("again", again)
                    self.finished = message.get("again") is False
                    self.current = message.get("begins")
                    if "verdict" in message:
                        yield Verdict(**{**message["verdict"], "result": Result(message["verdict"]["result"])})
            except BaseException:  # whoever reads the verdicts wants no more of them, or was interrupted
                process.kill()
                raise
            if self._silent:
                process.kill()
            code = process.wait()
            if self.current is not None:
                yield self._lost(code, self.current)
            elif not self.finished and not again:
                errors.seek(0)
                raise RuntimeError(f"a worker ended with status {code} outside any case:\n{errors.read()[-2000:]}")

    def _messages(self, answers: IO[bytes]) -> Iterator[dict[str, Any]]:
        rest = b""
        while True:
            ready, _, _ = select.select([answers], [], [], _SILENCE)
            if not ready:
                self._silent = True
                return
            read = os.read(answers.fileno(), 1 << 16)
            if not read:
                return
            *lines, rest = (rest + read).split(b"\n")
            yield from map(json.loads, lines)

    def _lost(self, code: int, case: str) -> Verdict:
        """The verdict on the case during which the worker ended."""
        if code == -signal.SIGXCPU:
            return Verdict(case=case, result=Result.TOO_SLOW, reason="used more CPU time than a case may")
        if self._silent:
            return Verdict(case=case, result=Result.TOO_SLOW, reason="waited for something that did not happen")
        how = signal.Signals(-code).name if code < 0 else f"status {code}"
        return Verdict(case=case, result=Result.CRASHED, reason=f"ended the process: {how}")


def fingerprint() -> str:
    """A checksum of the sources that verdicts depend on, and torch's version."""
    folders = (ROOT / "memplan", ROOT / "tests" / "parity")
    return fingerprint_of(ROOT, (file for folder in folders for file in sorted(folder.rglob("*.py"))))
