"""Options are checked when they are put together, whatever calls memplan, by errors that name the option."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any, get_type_hints

import pytest

import memplan
from memplan.errors import InvalidCosts, InvalidProblem, InvalidShapes, InvalidSize, MemplanError, UnsupportedProblem
from memplan.planning.options import DEFAULTS, PlanOptions, read_budget

VARYING = {"x": {0: "batch"}}


@pytest.mark.parametrize(
    ("options", "kind", "says"),
    [
        ({"gradients": "stolen"}, MemplanError, "gradients='stolen'"),
        ({"layout": "stack"}, UnsupportedProblem, "no layout 'stack'"),
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
        ({"compress": "zip"}, InvalidSize, "compress"),
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
        ({"dynamic_shapes": VARYING, "compress": "bits"}, InvalidShapes, "compress with dynamic_shapes"),
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
        "heavy = ('torch', 'numpy', 'memplan.solvers', 'memplan.schedule', 'memplan.evict.select')\n"
        "assert not [name for name in heavy if name in sys.modules]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("name", ["compile", "compile_step", "max_batch", "profile", "solve"])
def test_tools_can_read_the_types_of_public_functions(name: str) -> None:
    assert "return" in get_type_hints(getattr(memplan, name))
