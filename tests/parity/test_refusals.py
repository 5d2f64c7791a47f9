"""The list of expected refusals: every way in which a sweep may depart from it is found."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.parity import refusals
from tests.parity.verdicts import Result, Verdict

_EXPECTED = {"a|x": "because"}


def _verdict(result: Result, reason: str = "", case: str = "a|x") -> Verdict:
    return Verdict(case=case, result=result, reason=reason)


@pytest.mark.parametrize(
    ("verdict", "complaint"),
    [
        (_verdict(Result.REFUSED, "because"), None),
        (_verdict(Result.REFUSED, "other"), "another reason"),
        (_verdict(Result.PASSED), "expects a refusal"),
        (_verdict(Result.NO_REFERENCE), "expects a refusal"),
        (_verdict(Result.WRONG, "because"), "wrong: because"),
        (_verdict(Result.PASSED, case="b|x"), None),
        (_verdict(Result.NO_REFERENCE, case="b|x"), None),
        (_verdict(Result.REFUSED, "because", case="b|x"), "not expected"),
        (_verdict(Result.WRONG, "bits", case="b|x"), "wrong: bits"),
        (_verdict(Result.UNTYPED, "KeyError", case="b|x"), "untyped: KeyError"),
        (_verdict(Result.TOO_SLOW, case="b|x"), "too slow"),
        (_verdict(Result.CRASHED, case="b|x"), "crashed"),
    ],
)
def test_findings(verdict: Verdict, complaint: str | None) -> None:
    found = refusals.findings([verdict], _EXPECTED)
    if complaint is None:
        assert found == []
    else:
        assert len(found) == 1
        assert complaint in found[0]
        assert f"python -m tests.parity '{verdict.case}'" in found[0]


def test_what_rounds_otherwise_must_be_listed_and_do_so() -> None:
    rounded, wrong, passed = (_verdict(r, "bits", "r|x") for r in (Result.ROUNDED, Result.WRONG, Result.PASSED))
    listed = {"r|x": "why"}
    assert refusals.findings([rounded], {}, listed) == []
    assert "rounded otherwise: bits" in refusals.findings([rounded], {})[0]
    assert "wrong: bits" in refusals.findings([wrong], {}, listed)[0]
    assert "delete the line" in refusals.findings([passed], {}, listed)[0]
    assert "no such case" in refusals.findings([], {}, listed, complete=True)[0]


def test_the_committed_file_is_as_it_would_be_written(tmp_path: Path) -> None:
    copy = tmp_path / "refusals.txt"
    refusals.write(refusals.expected(), copy)
    assert copy.read_text() == refusals.FILE.read_text()
