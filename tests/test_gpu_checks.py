"""`scripts.gpu_checks` names tests that exist, the most doubtful first."""

from __future__ import annotations

from scripts.gpu_checks import ROOT, checks
from tests.runtime.test_cuda import SANITIZER


def test_the_checks_begin_with_the_most_doubtful_and_name_tests_that_exist() -> None:
    made = checks("python3")
    assert made[0].environment == {SANITIZER: "1"}, "that test alone has a process that is watched"
    text = (ROOT / "tests/runtime/test_cuda.py").read_text() + (ROOT / "tests/runtime/test_replay.py").read_text()
    for check in made:
        assert all((ROOT / path).exists() for path in check.command if path.startswith("tests/"))
        chosen = check.command[check.command.index("-k") + 1].split(" or ") if "-k" in check.command else []
        assert all(part in text for part in chosen)
