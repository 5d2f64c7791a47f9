"""The refusals that are expected: a committed file with a line `entry|variant|reason` for each case.

The list only shrinks: a refusal that is not in it, one for another reason, and one that disappeared all fail a sweep.
`roundings.txt` has the cases whose numbers are eager's up to rounding alone, each with its cause; it is kept by hand.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.parity.verdicts import Result, Verdict

_NONE: Mapping[str, str] = {}
FILE = Path(__file__).with_name("refusals.txt")
ROUNDINGS = Path(__file__).with_name("roundings.txt")


def expected(file: Path = FILE) -> dict[str, str]:
    """The expected reason of each case that is refused."""
    found: dict[str, str] = {}
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        entry, variant, reason = _fields(line, f"{file}:{number}")
        name = f"{entry}|{variant}"
        if name in found:
            raise ValueError(f"{file}:{number}: {name} is there twice; delete one of the lines")
        found[name] = reason
    return found


def _fields(line: str, where: str) -> tuple[str, str, str]:
    fields = line.split("|")
    if len(fields) != 3 or not all(fields):
        raise ValueError(f"{where}: {line!r} is not entry|variant|reason; renew the file with --update-refusals")
    return fields[0], fields[1], fields[2]


def findings(
    verdicts: Iterable[Verdict],
    expected: Mapping[str, str],
    roundings: Mapping[str, str] = _NONE,
    *,
    complete: bool = False,
) -> list[str]:
    """What must not be, a text of two lines for each; the second is the command that repeats the case.

    `roundings`: the cases that may round otherwise than aot_eager. `complete`: the verdicts are on all cases, so that a
    line for any other case is too many.
    """
    found: list[str] = []
    names = set()
    for verdict in verdicts:
        names.add(verdict.case)
        rounded = verdict.case in roundings
        if rounded and verdict.result is Result.ROUNDED:
            continue
        complaint = _complaint(verdict, expected.get(verdict.case))
        if rounded and not complaint:
            complaint = f"{verdict.case}: {verdict.result}, and {ROUNDINGS.name} has it: delete the line"
        if complaint:
            found.append(f"{complaint}\n    python -m tests.parity '{verdict.case}'")
    if complete:
        for file, listed in ((FILE, expected), (ROUNDINGS, roundings)):
            found += [f"{name}: in {file.name}, and there is no such case" for name in listed if name not in names]
    return found


def _complaint(verdict: Verdict, reason: str | None) -> str | None:
    name, result = verdict.case, verdict.result
    if result is Result.REFUSED:
        if reason is None:
            return f"{name}: refused, which was not expected: {verdict.reason}"
        if reason != verdict.reason:
            return f"{name}: refused for another reason than expected: {verdict.reason}\n    expected: {reason}"
        return None
    if result not in (Result.PASSED, Result.NO_REFERENCE):
        return f"{name}: {result}: {verdict.reason}"
    return f"{name}: {result}, and {FILE.name} expects a refusal: renew it with --update-refusals" if reason else None


def renewed(verdicts: Iterable[Verdict], expected: Mapping[str, str], *, complete: bool = False) -> dict[str, str]:
    """The expected refusals after these verdicts; those of other cases remain, unless the verdicts are complete."""
    judged = {v.case: v for v in verdicts}
    kept = {} if complete else {name: reason for name, reason in expected.items() if name not in judged}
    return kept | {name: v.reason for name, v in judged.items() if v.result is Result.REFUSED}


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What a renewal changes, a line for each: `-` for a refusal that is gone, `+` for a new one, `~` for a reason."""
    lines = [f"- {name}|{reason}" for name, reason in before.items() if name not in after]
    lines += [f"+ {name}|{reason}" for name, reason in after.items() if name not in before]
    return lines + [f"~ {name}|{reason}" for name, reason in after.items() if before.get(name, reason) != reason]


def write(refusals: Mapping[str, str], file: Path = FILE) -> None:
    """Write the file, in the order of the names."""
    file.write_text("".join(f"{name}|{refusals[name]}\n" for name in sorted(refusals)), encoding="utf-8")
