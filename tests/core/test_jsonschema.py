"""The schema of plan files: made from the dataclasses, shipped, and true."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from importlib import resources
from typing import Any

import fastjsonschema
import pytest
from hypothesis import given

from memplan.core.plan import Plan
from memplan.planning import planfile
from tests.graph_strategies import plans
from tests.samples import sample_plan

valid: Callable[[Any], Any] = fastjsonschema.compile(planfile.schema())


def test_the_shipped_schema_is_the_dataclasses() -> None:
    """To renew it: python -m tests.core.test_jsonschema > memplan/planning/plan.schema.json"""
    shipped = resources.files("memplan.planning").joinpath("plan.schema.json").read_text(encoding="utf-8")
    assert shipped == schema_text()


def schema_text() -> str:
    return json.dumps(planfile.schema(), indent=1) + "\n"


@given(plans())
def test_what_is_written_keeps_the_schema(plan: Plan) -> None:
    valid(json.loads(planfile.to_text(plan)))


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("graph"),
        lambda d: d.update(extra=1),
        lambda d: d.update(schema_version=1),
        lambda d: d.update(checksum="0"),
        lambda d: d["graph"]["ops"][0].update(direct=1),
        lambda d: d["graph"]["storages"][0].update(kind="other"),
        lambda d: d["solution"].update(status="best"),
        lambda d: d["solution"]["offsets"].update(activation_2=0.5),
        lambda d: d["problem"]["buffers"][0]["live"].pop("end"),
    ],
)
def test_what_breaks_the_schema_is_refused(change: Callable[[Any], Any]) -> None:
    data = json.loads(planfile.to_text(sample_plan()))
    valid(copy.deepcopy(data))
    change(data)
    with pytest.raises(fastjsonschema.JsonSchemaException):
        valid(data)


if __name__ == "__main__":
    print(schema_text(), end="")
