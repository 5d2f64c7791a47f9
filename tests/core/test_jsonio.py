from __future__ import annotations

import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memplan.core.jsonio import clip, from_json, show, to_json
from memplan.errors import InvalidPlan, InvalidProblem


class Colour(enum.Enum):
    RED = "the colour red"
    BLUE = "the colour blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Inner:
    size: int
    colour: Colour = Colour.RED

    def __post_init__(self) -> None:
        if self.size < 0:
            raise InvalidProblem("negative")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outer:
    name: str
    share: float
    flag: bool
    pair: tuple[int, str]
    items: tuple[Inner, ...]
    table: Mapping[str, int]
    maybe: int | None = None
    seconds: float = field(default=0.0, compare=False)


inners = st.builds(Inner, size=st.integers(0, 2**40), colour=st.sampled_from(Colour))
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
outers = st.builds(
    Outer,
    name=text,
    share=st.floats(allow_nan=False, allow_infinity=False),
    flag=st.booleans(),
    pair=st.tuples(st.integers(-(2**40), 2**40), text),
    items=st.lists(inners, max_size=3).map(tuple),
    table=st.dictionaries(text, st.integers(0, 9), max_size=3),
    maybe=st.none() | st.integers(0, 9),
)
GOOD: dict[str, object] = {
    "name": "n",
    "share": 0.5,
    "flag": True,
    "pair": [1, "x"],
    "items": [{"size": 1}],
    "table": {"k": 1},
}


@given(outers)
def test_what_is_written_is_read_back_equal(value: Outer) -> None:
    text_ = json.dumps(to_json(value), allow_nan=False)
    assert from_json(Outer, json.loads(text_), "outer") == value


def test_defaults_and_what_is_no_part_of_the_value_stay_out() -> None:
    value = Outer(name="n", share=1.0, flag=False, pair=(1, "x"), items=(Inner(size=1),), table={}, seconds=3.0)
    assert to_json(value) == {
        "name": "n",
        "share": 1.0,
        "flag": False,
        "pair": [1, "x"],
        "items": [{"size": 1}],
        "table": {},
    }


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"name": 1}, "outer.name"),
        ({"name": None}, "outer.name"),
        ({"name": "\ud800"}, "outer.name"),
        ({"share": "x"}, "outer.share"),
        ({"share": float("inf")}, "outer.share"),
        ({"share": 10**400}, "outer.share"),
        ({"flag": 1}, "outer.flag"),
        ({"pair": [1]}, "outer.pair"),
        ({"pair": [1, 2]}, "outer.pair[1]"),
        ({"pair": [True, "x"]}, "outer.pair[0]"),
        ({"pair": [2**63, "x"]}, "outer.pair[0]"),
        ({"pair": [-(10**5000), "x"]}, "outer.pair[0]"),
        ({"pair": {}}, "outer.pair"),
        ({"items": [{"size": -1}]}, "outer.items[0]"),
        ({"items": [{"size": 1, "colour": "green"}]}, "outer.items[0].colour"),
        ({"items": [{"size": 1, "colour": ["red"]}]}, "outer.items[0].colour"),
        ({"items": [{}]}, "outer.items[0].size"),
        ({"items": [{"size": 1, "x": 1}]}, "outer.items[0].x"),
        ({"table": [1]}, "outer.table"),
        ({"table": {"k": 1.5}}, "outer.table.k"),
        ({"table": {"\ud800": 1}}, "outer.table"),
        ({"maybe": "x"}, "outer.maybe"),
        ({"more": 1}, "outer.more"),
        ({"seconds": 1.0}, "outer.seconds"),
    ],
)
def test_the_path_of_the_first_fault_is_named(change: dict[str, object], where: str) -> None:
    with pytest.raises(InvalidPlan) as caught:
        from_json(Outer, GOOD | change, "outer")
    assert caught.value.where == where
    str(caught.value).encode()


def test_a_missing_key_is_named() -> None:
    with pytest.raises(InvalidPlan) as caught:
        from_json(Outer, {key: value for key, value in GOOD.items() if key != "pair"}, "outer")
    assert (caught.value.what, caught.value.where) == ("missing", "outer.pair")


@pytest.mark.parametrize("data", [None, 1, "x", [], True])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(InvalidPlan, match="outer"):
        from_json(Outer, data, "outer")


def test_messages_stay_short_whatever_the_data() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    for data in (deep, list(range(10**6)), {str(i): i for i in range(10**5)}, "x" * 10**6, 10**6000, "\x1b\n"):
        assert len(show(data)) <= 60
        assert show(data).isprintable()
    assert len(clip("x" * 100)) == 60
    while deep:  # taken apart by hand: freeing it in one go recurses
        deep = deep[0]  # type: ignore[assignment]
