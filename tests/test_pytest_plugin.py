"""The pytest plugin, in a pytest of its own."""

from __future__ import annotations

import os
import sys
from importlib.metadata import entry_points

import pytest

from memplan.errors import InvalidSize
from memplan.pytest_plugin import Checker
from tests.samples import sample_plan

pytest_plugins = ["pytester"]

# An installed memplan brings the plugin by its entry point.
LOAD = () if entry_points(group="pytest11", name="memplan") else ("-p", "memplan.pytest_plugin")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


HEAD = """
import pytest
from tests.samples import sample_plan
"""


def _run(pytester: pytest.Pytester, body: str) -> pytest.RunResult:
    pytester.makepyfile(HEAD + body)
    return pytester.runpytest_subprocess(*LOAD, "-p", "no:cacheprovider", "-W", "error", "--strict-markers")


def test_a_model_within_its_limits_passes_and_a_marker_that_checks_nothing_is_no_success(
    pytester: pytest.Pytester,
) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.memplan(arena="320 B", fragmentation=0.0, outside=248)
def test_marked(memplan):
    assert memplan.check(sample_plan()).arena_size == 320

def test_unmarked(memplan):
    memplan.check(sample_plan(), arena=320)

@pytest.mark.memplan("peak:320B", arena=1)
def test_a_limit_of_the_call_replaces_the_markers(memplan):
    memplan.check(sample_plan(), arena="1KiB")

@pytest.mark.memplan(arena=1)
def test_without_the_fixture():
    pass

@pytest.mark.memplan(arena=1)
def test_without_a_check(memplan):
    pass
""",
    )
    result.assert_outcomes(passed=4, errors=2)
    result.stdout.fnmatch_lines(["*needs the fixture*", "*checked nothing*"])


def test_one_byte_too_many_fails_and_shows_the_buffers(pytester: pytest.Pytester) -> None:
    result = _run(
        pytester,
        """
@pytest.mark.memplan(arena=319, outside="0B")
def test_memory(memplan):
    memplan.check(sample_plan())
""",
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*LimitExceeded: memplan: 1 of 1 over a limit",
            "*arena of sample is 320 B: 1 B more than 319 B (arena:319B)",
            "*128 B*activation*0-4*h.0.attn*model.py:12*aten.mm*",
            "*outside of sample is 248 B: 248 B more than 0 B*",
            "*parameters*100 B*",
        ]
    )
    assert "pytest_plugin.py" not in result.stdout.str()


def test_a_real_model_is_planned_and_a_failure_shows_no_log_of_torchs(pytester: pytest.Pytester) -> None:
    done = _run(
        pytester,
        """
import torch

@pytest.mark.memplan(arena="4 KiB", fragmentation="5%")
def test_memory(memplan):
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    assert memplan.check(model, torch.ones(4, 8)).arena_size > 0
    assert len(memplan.plans) == 1

@pytest.mark.memplan(arena="1 KiB")
def test_failing(memplan):
    memplan.check(torch.nn.Linear(64, 64), torch.ones(4, 64))
""",
    )
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["*FAIL*Linear*arena*"])
    done.stdout.no_fnmatch_line("*torch.__trace*")


@pytest.mark.parametrize(
    ("rules", "limits", "message"),
    [
        ((), {}, "no limit is given"),
        ((), {"arena": "much"}, "'much'"),
        ((), {"memory": 3}, "there is no limit 'memory'"),
        ((), {"fragmentation": 1.5}, "between 0 and 1"),
        (("arena:+2%",), {}, "is relative to a baseline"),
    ],
)
def test_limits_that_are_none_are_refused(rules: tuple[str, ...], limits: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidSize, match=message):
        Checker(rules, limits).check(sample_plan())  # type: ignore[arg-type]
