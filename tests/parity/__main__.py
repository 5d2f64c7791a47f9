"""`python -m tests.parity`: run the sweep, or the cases that are named, and print the counts and what is wrong."""

from __future__ import annotations

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.results import ResumableLines
from tests.parity import refusals
from tests.parity.cases import Selection
from tests.parity.sweep import CPU_SECONDS, fingerprint, sweep
from tests.parity.verdicts import Result, Verdict


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; 1 when something is wrong."""
    asked = _parser().parse_args(arguments)
    record = Record(asked.results)
    every = asked.every if not asked.names else 1
    selection = Selection(every=every, names=tuple(asked.names))
    parts = [replace(selection, part=i, parts=asked.jobs) for i in range(asked.jobs)]

    def run(part: Selection) -> None:
        for verdict in sweep(part, done=list(record.verdicts), seconds=asked.seconds):
            record.add(verdict)

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(run, parts))
    verdicts = list(record.verdicts.values())
    expected = refusals.expected()
    complete = every == 1 and not asked.names
    if asked.update_refusals:
        after = refusals.renewed(verdicts, expected, complete=complete)
        print(*refusals.changes(expected, after), sep="\n")
        refusals.write(after)
        expected = after
    found = refusals.findings(verdicts, expected, refusals.expected(refusals.ROUNDINGS), complete=complete)
    print(*found, sep="\n")
    if asked.names:
        print(*(f"{v.case}: {v.result} ({v.seconds:.1f} s) {v.reason}".rstrip() for v in verdicts), sep="\n")
    counts = Counter(v.result for v in verdicts)
    print(", ".join(f"{counts[result]} {result}" for result in Result), f"({len(verdicts)} cases)")
    if not verdicts:
        print("no case has this name: an entry's is like linalg.svd, a case's like 'linalg.svd|float32/last/raw/dense'")
    return 1 if found or not verdicts else 0


class Record:
    """The verdicts so far, by case; with a file, kept there too, so that a run that was ended goes on where it was."""

    def __init__(self, file: Path | None) -> None:
        self.verdicts: dict[str, Verdict] = {}
        self._lock = threading.Lock()
        self._lines = ResumableLines(file, fingerprint)
        for line in self._lines.known:
            verdict = json.loads(line)
            self.verdicts[verdict["case"]] = Verdict(**{**verdict, "result": Result(verdict["result"])})

    def add(self, verdict: Verdict) -> None:
        """Add a verdict."""
        with self._lock:
            self.verdicts[verdict.case] = verdict
            self._lines.add(json.dumps(asdict(verdict)))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.parity", description=__doc__)
    parser.add_argument("names", nargs="*", help="cases (linalg.svd|float32/last/raw/dense) or entries (linalg.svd)")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one case in N (10: what the tests run)")
    parser.add_argument("--jobs", type=int, default=1, help="worker processes (default 1)")
    parser.add_argument("--seconds", type=int, default=CPU_SECONDS, help="CPU time that a case may take")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep verdicts there, and go on from those there")
    parser.add_argument(
        "--update-refusals", action="store_true", help="write the refusals that were found; show changes"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
