"""Symbolic plans as files: what was written is read back equal; anything else is refused with the path of the fault."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given

from memplan.errors import MemplanError
from memplan.planning.planfile import checksum
from memplan.symbolic import SymbolicPlan, load_symbolic
from tests.symbolic.strategies import symbolic_plans
from tests.symbolic.test_plan import _example


@given(plan=symbolic_plans())
def test_what_is_saved_is_loaded_equal(plan: SymbolicPlan, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    before = path.read_bytes()
    found = load_symbolic(path)
    assert found == plan
    found.save(path)
    assert path.read_bytes() == before


def _changed(tmp_path: Path, change: Any) -> Path:
    path = tmp_path / "plan.json"
    _example(["batch < 50"]).save(path)
    data = json.loads(path.read_text())
    change(data)
    head = ("symbolic_version", "fingerprint", "checksum")
    data["checksum"] = checksum({k: v for k, v in data.items() if k not in head})
    path.write_text(json.dumps(data))
    return path


def _set(data: Any, *keys: Any) -> None:
    *path, last, value = keys
    for key in path:
        data = data[key]
    data[last] = value


@pytest.mark.parametrize(
    ("keys", "where"),
    [
        (("symbolic_version", 1), "symbolic version 1"),
        (("symbolic_version", None), "no symbolic_version"),
        (("extra", 1), "symbolic.extra"),
        (("symbols", 0, "name", "class"), r"symbols\[0\].name"),
        (("symbols", 0, "name", "batch size"), r"symbols\[0\].name"),
        (("symbols", 0, "min", 0), r"symbols\[0\]"),
        (("symbols", 0, "hint", 99), r"symbols\[0\].hint"),
        (("symbols", 1, "name", "batch"), r"symbols\[1\].name"),
        (("conditions", 0, "batch.real < 50"), r"conditions\[0\]"),
        (("conditions", 0, "batch + 50"), r"conditions\[0\]"),
        (("inputs", [["__import__"]]), r"inputs\[0\]"),
        (("sizes", "expressions", 0, "9"), r"sizes.storages\[0\]"),
        (("sizes", "expressions", 0, "open('x')"), r"sizes.expressions\[0\]"),
        (("sizes", "expressions", 0, "1 < batch"), r"sizes.expressions\[0\]"),
        (("sizes", "storages", [0]), "sizes.storages"),
        (("sizes", "storages", 0, 77), "sizes"),
        (("sizes", "views", 0, [0]), r"sizes.views\[0\]"),
        (("plan", "solution", "offsets", "activation_2", 0), "wrong arena size"),
        (("fingerprint", "0" * 64), "fingerprint"),
    ],
)
def test_a_file_that_was_changed_on_purpose_is_refused_by_path(tmp_path: Path, keys: Any, where: str) -> None:
    path = _changed(tmp_path, lambda data: _set(data, *keys))
    with pytest.raises(MemplanError, match=where):
        load_symbolic(path)
