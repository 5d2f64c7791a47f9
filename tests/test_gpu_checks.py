"""`scripts.gpu_checks`: goes on after a failure, keeps its time, and says what ran; with commands in place of tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from scripts.gpu_checks import ROOT, Check, checks, run_all
from tests.runtime.test_cuda import SANITIZER


def _check(name: str, code: str, seconds: float = 20.0) -> Check:
    return Check(name=name, command=(sys.executable, "-c", code), seconds=seconds, environment={"WITH": "it"})


def test_what_fails_or_hangs_does_not_stop_the_others(tmp_path: Path) -> None:
    output = tmp_path / "checks.json"
    later = f"import json; print(len(json.load(open({str(output)!r}))['checks']))"
    chosen = [
        _check("ends the process", "import os; print('so far', flush=True); os.abort()"),
        _check("hangs", "import time; time.sleep(60)", seconds=0.5),
        _check("skipped", "print('2 skipped in 1s')"),
        _check("passes", f"import os; assert os.environ['WITH'] == 'it'; assert os.environ['PIP_NO_INDEX']; {later}"),
    ]
    outcomes = run_all(chosen, output)
    assert [o["status"] for o in outcomes] == ["failed", "timed out", "skipped", "passed"]
    assert outcomes[0]["exit"] != 0
    assert outcomes[0]["output"][0] == "so far"
    assert outcomes[3]["output"] == ["4"], "the file has all checks while they run"
    found = json.loads(output.read_text())
    assert found["checks"] == outcomes
    assert found["counts"] == {"failed": 1, "timed out": 1, "skipped": 1, "passed": 1}
    assert found["versions"]["torch"]
    assert [o["status"] for o in run_all(chosen[3:], output, limit=0.0)] == ["not run"]
    assert json.loads(output.read_text())["counts"] == {"not run": 1}


def test_the_checks_begin_with_the_most_doubtful_and_name_tests_that_exist() -> None:
    made = checks("python3")
    assert made[0].environment == {SANITIZER: "1"}, "that test alone has a process that is watched"
    text = (ROOT / "tests/runtime/test_cuda.py").read_text() + (ROOT / "tests/runtime/test_replay.py").read_text()
    for check in made:
        assert all((ROOT / path).exists() for path in check.command if path.startswith("tests/"))
        chosen = check.command[check.command.index("-k") + 1].split(" or ") if "-k" in check.command else []
        assert all(part in text for part in chosen)
