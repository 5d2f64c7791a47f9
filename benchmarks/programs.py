"""Third-party programs, moved to memplan as their owners would: the same numbers as eager, and no more memory?

    python -m benchmarks.programs --results programs.jsonl --jobs 2
    python -m benchmarks.programs dcgan mnist        (only these; nothing is written)

Each program runs each way (`benchmarks.program_run`) in a process of its own, with one thread. Losses, results of the
evaluation, parameters and buffers are compared bit by bit with eager's and with those of
`torch.compile(backend="aot_eager")`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.preloaded import start
from benchmarks.program_run import FUSED, WAYS, WHOLE
from benchmarks.results import RESULTS, ResumableLines, Row, Table, fingerprint_of, write

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # that a process may take
_WORDS = {"backend": 'model.compile(backend="memplan")', "compile": "memplan.compile", "compile_step": "compile_step"}


class Result(StrEnum):
    """How a program ran one way, in comparison with eager; a later member is worse."""

    BITWISE = "bitwise"
    EAGER = "runs eagerly"
    FUSED = "bitwise fused"
    AS_AOT_EAGER = "as aot_eager"
    REFUSED = "refused"
    AOT_FAILS = "aot_eager fails"
    FAILED = "failed"
    WRONG = "wrong"


_SAME = (Result.BITWISE, Result.EAGER, Result.FUSED, Result.AS_AOT_EAGER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How one program ran one way.

    `peak` is the ratio of its peak, without alignment padding, to eager's; `passes_peak` the same outside of the
    optimizer's own `step()`: of forward and backward.
    """

    program: str
    way: str
    result: Result
    reason: str = ""
    peak: float | None = None
    passes_peak: float | None = None
    seconds: float = 0.0


def judge(program: str, outcomes: Mapping[str, Mapping[str, Any]]) -> list[Verdict]:
    """Return a verdict for each way, from what came out of each (`benchmarks.program_run.outcome_of`).

    Args:
        program: The name of the program.
        outcomes: What came out, by way: "eager", what is compared with it, and further references where they ran.

    Returns:
        The verdicts; only one, on eager, where that failed.
    """
    eager = outcomes["eager"]
    if "losses" not in eager:
        return [Verdict(program=program, way="eager", result=Result.FAILED, reason=eager.get("failed", ""))]
    judged = [way for way in outcomes if way not in ("eager", FUSED, WHOLE)]
    return [_verdict(program, way, outcomes[way], outcomes) for way in judged]


def _verdict(program: str, way: str, found: Mapping[str, Any], outcomes: Mapping[str, Mapping[str, Any]]) -> Verdict:
    eager = outcomes["eager"]
    if "refused" in found:
        return Verdict(program=program, way=way, result=Result.REFUSED, reason=f"{found['refused']} ({found['see']})")
    if "losses" not in found:
        same = way != "aot_eager" and "losses" not in outcomes.get("aot_eager", {})
        result = Result.AOT_FAILS if same else Result.FAILED
        return Verdict(program=program, way=way, result=result, reason=found["failed"])
    difference = difference_of(found, eager)
    peak, passes = (_share(found, eager, key) for key in ("peak", "passes_peak"))
    plain = Result.BITWISE if found["compiled"] else Result.EAGER
    judged = _result_of(found, outcomes) if difference else plain
    return Verdict(
        program=program, way=way, result=judged, reason=difference, peak=peak, passes_peak=passes,
        seconds=found["seconds"],
    )  # fmt: skip


def _share(found: Mapping[str, Any], eager: Mapping[str, Any], key: str) -> float | None:
    """Return a peak without alignment padding as a share of eager's; None where one was not measured."""
    return (found[key] - found["padding"]) / eager[key] if eager[key] and found[key] else None


def _result_of(found: Mapping[str, Any], outcomes: Mapping[str, Mapping[str, Any]]) -> Result:
    """Return which other way of torch's own has the bits of an outcome that differs from eager's."""
    alike = {"aot_eager": Result.AS_AOT_EAGER, WHOLE: Result.AS_AOT_EAGER, FUSED: Result.FUSED}
    for way, result in alike.items():
        if "losses" in outcomes.get(way, {}) and not difference_of(found, outcomes[way]):
            return result
    return Result.WRONG


def difference_of(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return the first result that differs in a bit, and by how much; empty if none does."""
    import torch

    if len(one["losses"]) != len(other["losses"]):
        return f"{len(one['losses'])} losses instead of {len(other['losses'])}"
    pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(one["losses"], other["losses"], strict=True))]
    if one["results"].keys() != other["results"].keys():
        return "results of other names: " + ", ".join(sorted(one["results"].keys() ^ other["results"].keys())[:4])
    pairs += [(name, value, other["results"][name]) for name, value in one["results"].items()]
    for name, a, b in pairs:
        if a.shape != b.shape or a.dtype != b.dtype:
            return f"{name} is {a.dtype} {tuple(a.shape)} instead of {b.dtype} {tuple(b.shape)}"
        if not torch.equal(_bits(a), _bits(b)):
            apart = (a.double() - b.double()).abs().max().item()
            return f"{name} differs by {apart:.3g}"
    return ""


def _bits(value: Any) -> Any:
    """Return the bytes of a tensor, so that NaN equals NaN and -0.0 is not 0.0."""
    import torch

    return value.contiguous().reshape(-1).view(torch.uint8)


def run(program: str, ways: Sequence[str], seconds: float = SECONDS) -> list[Verdict]:
    """Run one program each way, in processes of their own, and judge.

    Args:
        program: A name of `benchmarks.program_zoo.PROGRAMS`.
        ways: The ways, "eager" among them.
        seconds: The time that each process may take.

    Returns:
        The verdicts, one for each way but eager.

    Example:
        >>> [verdict.result for verdict in run("vae", ["eager", "compile"])]
        [<Result.BITWISE: 'bitwise'>]
    """
    import torch

    outcomes: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        waiting = list(ways)
        while waiting:
            way = waiting.pop(0)
            file = Path(folder) / f"{way}.pt"
            failed = _apart(program, way, file, seconds)
            outcomes[way] = {"failed": failed} if failed else torch.load(file)
            if not waiting and not outcomes.keys() & {FUSED, WHOLE}:
                waiting = [*_other_references(outcomes)]
    return judge(program, outcomes)


def _other_references(outcomes: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the variants of eager and aot_eager to compare with what has the bits of neither."""
    wrong = {verdict.way for verdict in judge("", outcomes) if verdict.result is Result.WRONG}
    if "compile_step" in wrong:
        yield FUSED
    if "compile" in wrong:
        yield WHOLE


def _apart(program: str, way: str, file: Path, seconds: float) -> str:
    """Run one program one way in a new process, which writes `file`; return why there is none."""
    log = file.with_suffix(".log")
    environment = {"TOKENIZERS_PARALLELISM": "false"}
    process = start(
        "benchmarks.program_run", [program, way, "--to", str(file)], log=log, folder=ROOT, environment=environment
    )
    try:
        process.join(seconds)
        late = process.is_alive()
    finally:
        process.kill()
        process.join()
    if late:
        return f"not done after {seconds:g} s"
    if file.exists():
        return ""
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return f"exit status {process.exitcode}: {said[-1][:200] if said else 'nothing said'}"


class Record:
    """The verdicts so far, by program; with a file, kept there too, so that a run that was ended goes on."""

    def __init__(self, file: Path | None) -> None:
        self.verdicts: dict[str, list[Verdict]] = {}
        self._lock = threading.Lock()
        self._lines = ResumableLines(file, fingerprint)
        for line in self._lines.known:
            found = [Verdict(**{**verdict, "result": Result(verdict["result"])}) for verdict in json.loads(line)]
            self.verdicts[found[0].program] = found

    def add(self, verdicts: list[Verdict]) -> None:
        """Add the verdicts on one program."""
        with self._lock:
            self.verdicts[verdicts[0].program] = verdicts
            for verdict in verdicts:
                print(f"{verdict.program} {verdict.way}: {verdict.result} {verdict.reason}".rstrip(), flush=True)
            self._lines.add(json.dumps([asdict(verdict) for verdict in verdicts]))


def fingerprint() -> str:
    """Return a checksum of the sources that verdicts depend on, and torch's version."""
    files = [*(ROOT / "memplan").rglob("*.py"), *(ROOT / "benchmarks").glob("program*/**/*.py")]
    return fingerprint_of(ROOT, sorted([*files, *(ROOT / "benchmarks").glob("program*.py")]))


def selected(names: Sequence[str], every: int) -> list[str]:
    """Return the programs to run: those that are named, or one in `every`, whose libraries are installed."""
    from benchmarks.program_zoo import PROGRAMS

    if unknown := [name for name in names if name not in PROGRAMS]:
        raise SystemExit(f"{', '.join(unknown)}: not one of {', '.join(PROGRAMS)}")
    return [name for name in names or list(PROGRAMS)[::every] if not missing(name)]


def missing(program: str) -> list[str]:
    """Return the libraries that a program needs and that are not installed (the extra "programs" brings them)."""
    from benchmarks.program_zoo import PROGRAMS

    return [name for name in PROGRAMS[program].libraries if find_spec(name) is None]


def table_of(verdicts: Sequence[Verdict]) -> Table:
    """Return the table: a row for each program, and for each way what came out, and the peak beside eager's."""
    rows: list[Row] = []
    for program in dict.fromkeys(verdict.program for verdict in verdicts):
        by_way = {verdict.way: verdict for verdict in verdicts if verdict.program == program}
        row: dict[str, Any] = {"program": program}
        for way, verdict in by_way.items():
            shown = verdict.result in _SAME
            row[way] = verdict.result.value if shown else f"{verdict.result}: {_escaped(verdict.reason)}"
            row |= {f"{way}_passes": verdict.passes_peak, f"{way}_peak": verdict.peak}
        rows.append(row)
    columns = {"program": "program", "aot_eager": "aot_eager"}
    for way, words in _WORDS.items():
        columns |= {way: words, f"{way}_passes": "forward and backward / eager's", f"{way}_peak": "step / eager's"}
    counts = [
        f"- {words}: " + ", ".join(f"{n} {result}" for result, n in sorted(_counts(verdicts, way).items()))
        for way, words in _WORDS.items()
    ]
    above = [
        f"- {v.program}, {_WORDS[v.way]}: {v.peak:.3f}" for v in verdicts if v.way in _WORDS and (v.peak or 0) > 1.0
    ]
    notes = [
        "bitwise: losses, results of the evaluation, parameters and buffers have eager's bits. runs eagerly: so they "
        "have, and dynamo found no graph to compile. bitwise fused: those of eager with torch's fused optimizer, where "
        'these differ. as aot_eager: those of torch.compile(backend="aot_eager"), with recurrent layers traced too, '
        "where these differ. -: the way does not apply (several optimizers or losses, or a loop that is not the "
        "program's own).",
        "",
        "Peaks: the fourth training step, by memory events, with all tensors that are alive before it, alignment "
        "padding of single plans apart; 'forward and backward' leaves out what is alive only while an optimizer's own"
        " `step()` runs. Most programs need less than a megabyte, and what a compiled module keeps beside its arena "
        "is a large part of it: the ratios say little about large ones. Where they are above 1, it is by some bytes: "
        "numbers that kernels take as tensors (a count that a sum is divided by, the 1 that a counter is raised by), "
        "and constants of at most 64 bytes. A program keeps them, and so makes nothing outside of its arena.",
        "",
        *counts,
        "",
        *(["Above eager's peak:", "", *above] if above else ["No program is above eager's peak."]),
    ]
    title = "Programs as they are: third-party training programs, cpu"
    return Table(name="programs", title=title, columns=columns, rows=rows, settings={"threads": 1}, notes=notes)


def _counts(verdicts: Sequence[Verdict], way: str) -> Counter[str]:
    return Counter(str(verdict.result) for verdict in verdicts if verdict.way == way)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the arguments say; 1 when something is wrong, or failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.programs", description="Third-party programs.")
    parser.add_argument("names", nargs="*", help="programs (default: all whose libraries are installed)")
    parser.add_argument("--ways", default=",".join(WAYS), help="comma-separated; eager and aot_eager always run")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one program in N")
    parser.add_argument("--jobs", type=int, default=1, help="programs at a time (default 1)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time that each process may take")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep verdicts there, and go on from those there")
    parser.add_argument("--directory", type=Path, default=RESULTS, help="folder of the table, written if all ran")
    asked = parser.parse_args(arguments)
    from benchmarks.program_zoo import PROGRAMS

    record = Record(asked.results)
    chosen = selected(asked.names, asked.every)

    def work(name: str) -> None:
        if name not in record.verdicts:
            wanted = {"eager", "aot_eager", *asked.ways.split(",")}
            record.add(run(name, [way for way in PROGRAMS[name].ways if way in wanted], asked.seconds))

    with ThreadPoolExecutor(asked.jobs) as pool:
        list(pool.map(work, chosen))
    verdicts = [verdict for name in chosen for verdict in record.verdicts[name]]
    if len(chosen) == len(PROGRAMS):
        write(table_of(verdicts), asked.directory)
    for way in _WORDS:
        print(f"{way}:", ", ".join(f"{n} {result}" for result, n in sorted(_counts(verdicts, way).items())))
    bad = [v for v in verdicts if v.way != "aot_eager" and v.result in (Result.WRONG, Result.FAILED)]
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
