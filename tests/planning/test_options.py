"""Options, devices and their memory are checked by errors that name them."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memplan
from memplan.core.gpus import GPUS
from memplan.core.host_limit import host_memory
from memplan.errors import (
    InvalidCosts,
    InvalidProblem,
    InvalidShapes,
    InvalidSize,
    MemplanError,
    UnsupportedDevice,
    UnsupportedProblem,
)
from memplan.evict.costs import DEVICES
from memplan.planning.memory_answer import ALLOWANCE, capacity_of
from memplan.planning.options import DEFAULTS, PlanOptions, read_budget
from memplan.trace.batches import largest_within

VARYING = {"x": {0: "batch"}}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"gradients": "stolen"}, MemplanError, "gradients='stolen'"),
        ({"layout": "stack"}, MemplanError, "layout='stack'"),
        ({"layout": "tstack", "solver": "greedy"}, UnsupportedProblem, "not by 'greedy'"),
        ({"solver": "luck"}, UnsupportedProblem, "no solver 'luck'"),
        ({"solver": 5}, UnsupportedProblem, "5 is no solver"),
        ({"time_limit": "1"}, InvalidProblem, "time_limit"),
        ({"time_limit": -1.0}, InvalidProblem, "time_limit"),
        ({"policy": "hope"}, MemplanError, "policy='hope'"),
        ({"schedule": "whenever"}, MemplanError, "schedule='whenever'"),
        ({"costs": "abacus"}, InvalidCosts, "no cost model 'abacus'"),
        ({"costs": "measure"}, InvalidCosts, "measure their first steps"),
        ({"divide": "many"}, InvalidSize, "divide"),
        ({"compress": "zip"}, MemplanError, "compress='zip'"),
        ({"budget": "5 parsecs"}, InvalidSize, "parsecs"),
        ({"budget": "150%"}, InvalidSize, "share"),
        ({"budget": {"a": 1}}, InvalidSize, "is not a budget"),
        ({"budget": b"1MiB"}, InvalidSize, "is not a budget"),
        ({"budget": [1, 2]}, InvalidSize, "there is one device"),
        *(({"budget": budget}, InvalidSize, "budget") for budget in (1.5, -1, 0.0, True)),
        ({"arena_budget": "150%"}, InvalidSize, "arena_budget"),
        ({"arena_budget": [1, 2]}, InvalidSize, "arena_budget"),
        ({"host_budget": 0.5}, InvalidSize, "host_budget"),
        ({"host_budget": "min"}, InvalidSize, "host_budget"),
        ({"pinned_budget": -1}, InvalidSize, "pinned_budget"),
        ({"reserve": True}, InvalidSize, "reserve"),
        ({"dynamic_shapes": VARYING, "device": "cpu"}, InvalidShapes, "device with dynamic_shapes"),
        ({"dynamic_shapes": VARYING, "divide": 4}, InvalidShapes, "divide with dynamic_shapes"),
        ({"dynamic_shapes": VARYING, "compress": "int8"}, InvalidShapes, "compress with dynamic_shapes"),
        ({"dynamic_shapes": VARYING, "budget": 0.5}, InvalidShapes, "budget with dynamic_shapes"),
    ],
    ids=str,
)
def test_a_wrong_option_is_refused_by_name(options: dict[str, Any], kind: type[MemplanError], says: str) -> None:
    with pytest.raises(kind) as caught:
        PlanOptions(**options)
    assert says in str(caught.value)
    with pytest.raises(kind):
        replace(DEFAULTS, **options)


@pytest.mark.parametrize(
    ("budget", "read"), [(7, 7), ("1KiB", 1024), (0.5, 0.5), ("50%", 0.5), ("min", "min"), (0, 0), (1.0, 1.0)]
)
def test_a_budget_is_bytes_a_share_or_the_least(budget: Any, read: Any) -> None:
    assert read_budget(budget) == read
    assert type(read_budget(budget)) is type(read)


def test_the_layout_chooses_its_solver() -> None:
    assert PlanOptions(solver="greedy").layout_solver == "greedy"
    assert PlanOptions(layout="tstack").layout_solver == "tstack"
    assert PlanOptions(layout="tstack", solver="tstack").layout_solver == "tstack"


def test_the_defaults_import_no_policy_no_solver_and_no_torch() -> None:
    code = (
        "import sys, memplan.planning.options\n"
        "heavy = ('torch', 'numpy', 'memplan.solvers', 'memplan.schedule', 'memplan.evict.policies')\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["compile", "compile_step", "max_batch", "profile", "solve"])
def test_tools_can_read_the_types_of_public_functions(name: str) -> None:
    assert "return" in get_type_hints(getattr(memplan, name))


def test_devices_have_memory_costs_and_an_allowance() -> None:
    for name, total in {**{gpu.name: gpu.memory for gpu in GPUS.values()}, "sm90:40GiB": 40 << 30}.items():
        found = capacity_of(name)
        assert (found.total, found.allowance, found.slack) == (total, ALLOWANCE, int(total * 0.05))
        assert found.usable == total - ALLOWANCE - found.slack
        assert found.costs in DEVICES
        assert not found.is_host
    assert capacity_of("4090") == replace(capacity_of("rtx4090"), device="4090")
    own = capacity_of("cpu", allowance=0, slack=0)
    assert own.is_host
    assert own.usable == host_memory()


@pytest.mark.parametrize(("slack", "free"), [("5%", 51), (0.05, 51), (10, 10), ("0%", 0), (0, 0), ("1KiB", None)])
def test_a_size_is_the_steps_but_for_the_slack(slack: float | str, free: int | None) -> None:
    if free is None:
        with pytest.raises(InvalidSize, match="nothing is left"):
            capacity_of(1024, slack=slack)
    else:
        assert capacity_of("1KiB", slack=slack).usable == 1024 - free
        assert capacity_of(1024, slack=slack, allowance="24B").usable == 1000 - free


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ({"device": "h1000"}, UnsupportedDevice, "did you mean 'h100'.*24GiB"),
        ({"device": ""}, UnsupportedDevice, "24GiB"),
        ({"device": "24GB of"}, InvalidSize, "target"),
        ({"device": -1}, InvalidSize, "target"),
        ({"device": 2.5}, InvalidSize, "target"),
        ({"device": "h100", "slack": "105%"}, InvalidSize, "slack"),
        ({"device": "h100", "slack": -0.5}, InvalidSize, "slack"),
        ({"device": "h100", "slack": 1.0}, InvalidSize, "slack"),
        ({"device": "h100", "allowance": "some"}, InvalidSize, "allowance"),
        ({"device": "l4", "allowance": "22GiB"}, InvalidSize, "nothing is left"),
    ],
)
def test_bad_devices(arguments: dict[str, object], error: type[Exception], what: str) -> None:
    with pytest.raises(error, match=what):
        capacity_of(**arguments)  # type: ignore[arg-type]


@given(st.integers(1, 500), st.integers(0, 50), st.integers(0, 10_000), st.integers(1, 300))
def test_the_largest_size_is_found_where_needs_rise(fixed: int, slope: int, limit: int, highest: int) -> None:
    tried: list[int] = []

    def over(size: int) -> int:
        tried.append(size)
        return fixed + slope * size + size // 7 * 3 - limit

    right = [size for size in range(1, highest + 1) if over(size) <= 0]
    tried.clear()
    if right:
        assert largest_within(over, limit, lowest=1, highest=highest) == max(right)
        assert len(tried) <= 30
