"""`dynamic_shapes=` as torch.export takes it, and what makes no sense of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from memplan.errors import InvalidShapes
from memplan.trace.dynamic.dims import Range, Varying, read_dims


class Two(nn.Module):
    def forward(self, x: Tensor, rest: dict[str, Any], flag: bool = False) -> Tensor:
        return x


X, Y = torch.zeros(4, 8), torch.zeros(4, 3)
B = Dim("batch", min=2, max=64)


def _read(given: Any, args: tuple[Any, ...] = (X, {"y": [Y, 7]}), **kwargs: Any) -> Any:
    return read_dims(Two(), args, kwargs, given)


@pytest.mark.parametrize(
    "given",
    [
        {"x": {0: B}, "rest": {"y": [{0: B}, None]}},
        ({0: B}, {"y": ({0: B}, None)}),
        {"x": (B, None), "rest": {"y": [(B, 3), None]}},
    ],
)
def test_by_name_and_by_position(given: Any) -> None:
    dims = _read(given)
    assert dims.symbols == (Range(name="batch", min=2, max=64, example=4, strict=True),)
    assert dims.leaves == ({0: Varying(symbol="batch")}, {0: Varying(symbol="batch")}, {})


def test_keyword_arguments_and_negative_dimensions() -> None:
    dims = read_dims(Two(), (), {"rest": {}, "x": X}, {"x": {-1: Dim("width", max=9)}})
    assert dims.leaves == ({1: Varying(symbol="width")},)
    assert (dims.symbols[0].min, dims.symbols[0].max) == (1, 9)


def test_multiples() -> None:
    dims = _read({"x": {0: 2 * Dim("half", min=1, max=9), 1: 3 * Dim("part", max=5) + 2}})
    assert [str(v) for v in dims.leaves[0].values()] == ["2*half", "3*part + 2"]
    assert [s.example for s in dims.symbols] == [2, 2]


def test_hints_and_numbers() -> None:
    dims = _read({"x": {0: Dim.AUTO, 1: 8}, "rest": {"y": [{0: Dim.DYNAMIC(min=3, max=7), 1: Dim.STATIC}, None]}})
    assert [(s.name, s.min, s.max, s.strict) for s in dims.symbols] == [
        ("in0_dim0", 1, 2**31 - 1, False),
        ("in1_dim0", 3, 7, True),
    ]


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({}, "no dimension varies"),
        ({"x": {0: None}}, "no dimension varies"),
        ({"z": {0: B}}, "no argument 'z'"),
        ([{0: B}], "1 entries for 2 arguments"),
        ("batch", "is a str"),
        ({"x": B}, "not a dict"),
        ({"x": {2: B}}, "2 dimensions"),
        ({"x": {"0": B}}, "2 dimensions"),
        ({"x": (B,)}, "1 entries for 2 dimensions"),
        ({"x": {0: "batch"}}, "is not a Dim"),
        ({"x": {0: 5}}, "is 5, the example has 4"),
        ({"x": {0: B, 1: B}}, "batch is 4 and 8"),
        ({"x": {0: Dim("batch", max=3)}}, "outside of 1..3"),
        ({"x": {0: B, 1: Dim("batch", min=3, max=9)}}, "batch is 4 and 8"),
        ({"x": {0: 3 * Dim("third", max=9)}}, r"is 3\*third, the example has 4"),
        ({"rest": {"y": [None, {0: B}]}}, "not a tensor"),
        ({"rest": {"z": [{0: B}]}}, "does not match"),
    ],
)
def test_nonsense_is_refused_by_path(given: Any, complaint: str) -> None:
    with pytest.raises(InvalidShapes, match=complaint):
        _read(given)


def test_two_dims_of_one_name_are_refused() -> None:
    given = {"x": {0: B}, "rest": {"y": [{0: Dim("batch", min=2, max=65)}, None]}}
    with pytest.raises(InvalidShapes, match="two Dims"):
        _read(given)
